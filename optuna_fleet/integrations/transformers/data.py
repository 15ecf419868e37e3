"""How a `transformers.Trainer` reads a trial's data, and evaluates on all of its devices.

And what the losses of a rank count among those of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.trainer_pt_utils import nested_concat

from optuna_fleet.trainer.gradients.collectives import gather
from optuna_fleet.trainer.gradients.weights import Share
from optuna_fleet.trainer.nested import map_tensors
from optuna_fleet.trainer.trial import FleetTrial

_concat: Any = nested_concat
_PADDING = -100  # what Transformers fills up logits and labels of unlike lengths with


class Loader:
    """What a Trainer takes for its DataLoader: this rank's share of each batch.

    Args:
        batch_size: That of the whole trial.
        columns: Those that the model takes; None for all.

    Attributes:
        dataset: As long as the data set; nothing else.
        shares: The shares of the batches that were read, until somebody clears it.
    """

    def __init__(
        self,
        trial: FleetTrial,
        name: str,
        batch_size: int,
        *,
        drop_last: bool,
        columns: list[str] | None,
    ) -> None:
        self.batch_size = batch_size
        self.shares: list[Share] = []
        self._trial = trial
        self._batches = trial.batches(name, batch_size, drop_last=drop_last)
        self._columns = columns
        self.dataset = range(trial.num_samples(name))

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            self.shares.append(self._trial.batch_share)
            yield self._chosen(batch)

    def _chosen(self, batch: Any) -> Any:
        if self._columns is None or not isinstance(batch, Mapping):
            return batch
        return {name: value for name, value in batch.items() if name in self._columns}


@dataclass(slots=True)
class Part:
    """A rank's part in the loss of a batch.

    Attributes:
        share: What the loss of its samples counts in that of all.
        num_items: How many labels its samples have; None where that does not matter.
    """

    share: Any
    num_items: torch.Tensor | None = None

    @classmethod
    def of_items(cls, num_items: torch.Tensor, total: torch.Tensor) -> Part:
        """Of a mean over labels."""
        return cls(num_items / total if total > 0 else torch.zeros_like(total), num_items)

    def divisor(self, num_items_in_step: torch.Tensor) -> torch.Tensor:
        """What a model divides its sum over labels by, given those of all batches of a step.

        So the sum over the ranks of the losses times their shares is what it would be on one. A
        model that returns a mean whatever it is given is right as well.
        """
        return num_items_in_step * self.share if self.share > 0 else torch.ones_like(self.share)


@dataclass(slots=True)
class Outcome:
    """What `Trainer.prediction_step` has given for one batch, or a rank's share of it.

    Attributes:
        loss: Its mean loss.
        weight: What that weighs among the shares of the batch.
        num_rows: Number of samples.
        kept: Logits, labels and inputs.
    """

    loss: torch.Tensor | None
    weight: float
    num_rows: int
    kept: tuple[Any, Any, Any]

    @classmethod
    def merged(cls, parts: list[Outcome]) -> Outcome:
        """That of a batch from those of its shares, in order."""
        if len(parts) == 1:
            return parts[0]
        weight = sum(part.weight for part in parts)
        counting = [part for part in parts if part.weight] or parts
        losses = [p.loss * (p.weight / weight) for p in counting if p.loss is not None]
        kept = tuple(_concatenated(some) for some in zip(*(p.kept for p in parts), strict=True))
        return cls(
            loss=torch.stack(losses).sum() if losses else None,
            weight=weight,
            num_rows=sum(part.num_rows for part in parts),
            kept=kept,
        )


def _concatenated(parts: tuple[Any, ...]) -> Any:
    whole, *others = parts
    for part in others if whole is not None else ():
        whole = _concat(whole, part, padding_index=_PADDING)
    return whole


class Merged(dict[str, Any]):
    """Stands for the inputs of a batch that all ranks have evaluated: `outcome` is there."""

    outcome: Outcome


class Evaluation:
    """Evaluates each rank's share, and hands out whole batches with their outcomes.

    Trainer's own loop goes over these as it does in one process. So metrics are computed of all
    samples, in their order, on every rank.

    Args:
        step: Returns the loss, its weight (None: the number of samples), logits and labels.
        main_input: Name of the inputs that Trainer looks at.
        gradient_state: Accelerate's, which knows from whoever is read when a pass ends.

    Attributes:
        end_of_dataloader: The last batch was handed out.
        remainder: Number of samples of the last batch if these are fewer than in others, else 0.
    """

    def __init__(
        self,
        loader: Loader,
        step: Callable[[Any], tuple[Any, float | None, Any, Any]],
        *,
        main_input: str,
        with_inputs: bool,
        gradient_state: Any,
    ) -> None:
        self.end_of_dataloader = False
        self.remainder = -1
        self.dataset = loader.dataset
        self._loader = loader
        self._step = step
        self._main_input = main_input
        self._with_inputs = with_inputs
        self._gradient_state = gradient_state

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Merged]:
        self._gradient_state._add_dataloader(self)
        try:
            for number, outcome in enumerate(self._outcomes(), 1):
                inputs = outcome.kept[2] if self._with_inputs else torch.empty(outcome.num_rows)
                merged = Merged({self._main_input: inputs})
                merged.outcome = outcome
                if number == len(self):
                    self.end_of_dataloader = True
                    self.remainder = outcome.num_rows % self._loader.batch_size
                yield merged
        finally:
            self._gradient_state._remove_dataloader(self)

    def _outcomes(self) -> Iterator[Outcome]:
        if self._loader._trial.world_size == 1:
            for _, outcome in self._own():
                yield outcome
            return
        everyone = gather({str(step): _plain(outcome) for step, outcome in self._own()})
        for step in map(str, range(len(self))):
            yield Outcome.merged([Outcome(*one[step]) for one in everyone if step in one])

    def _own(self) -> Iterator[tuple[int, Outcome]]:
        """This rank's, and of which step: it has none of batches that are too small for all."""
        with torch.no_grad():
            for number, inputs in enumerate(self._loader):
                share = self._loader.shares.pop()
                loss, weight, logits, labels = self._step(inputs)
                outcome = Outcome(
                    loss=None if loss is None else loss.detach().cpu(),
                    weight=float(share.local_size if weight is None else weight),
                    num_rows=share.local_size,
                    kept=_on_cpu((logits, labels, self._inputs_in(inputs))),
                )
                is_last = share.global_size < self._loader.batch_size
                yield (len(self) - 1 if is_last else number), outcome

    def _inputs_in(self, inputs: Any) -> Any:
        return inputs[self._main_input] if self._with_inputs else None


def _on_cpu(data: Any) -> Any:
    return map_tensors(data, lambda tensor: tensor.detach().cpu())


def _plain(outcome: Outcome) -> tuple[Any, ...]:
    return outcome.loss, outcome.weight, outcome.num_rows, outcome.kept
