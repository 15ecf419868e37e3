"""How a Trainer reads a trial's data, what a rank's losses count, and what of it moves along."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.trainer_callback import ExportableState

from optuna_fleet.trainer.gradients.weights import Share
from optuna_fleet.trainer.trial import FleetTrial


class Loader:
    """What a Trainer takes for its DataLoader: this rank's share of each batch, or all of it.

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
        self.batch_size, self.drop_last = batch_size, drop_last
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


class Evaluation:
    """The batches of an evaluation, of which Accelerate knows when the last one was handed out.

    Args:
        gradient_state: Accelerate's: what Trainer has of the last batch it takes as many samples
            of as that has.

    Attributes:
        end_of_dataloader: The last batch was handed out.
        remainder: Number of samples of the last batch if these are fewer than in others, else 0.
    """

    def __init__(self, loader: Loader, gradient_state: Any) -> None:
        self.end_of_dataloader = False
        self.dataset = loader.dataset
        self.remainder = 0 if loader.drop_last else len(loader.dataset) % loader.batch_size
        self._loader = loader
        self._gradient_state = gradient_state

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self._gradient_state._add_dataloader(self)
        try:
            for number, batch in enumerate(self._loader, 1):
                self.end_of_dataloader = number == len(self)
                yield batch
        finally:
            self._gradient_state._remove_dataloader(self)


class Progress:
    """The state of Trainer that is neither the model's nor the optimizer's.

    Attributes:
        num_epochs: How many epochs are done.
    """

    def __init__(self, trainer: Any) -> None:
        self.num_epochs = 0
        self._trainer = trainer
        self._saved: dict[str, Any] | None = None
        self._final: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """What rank 0 has, at the end of an epoch, or had when there were no more."""
        return self._present() if self._final is None else self._final

    def end(self) -> None:
        """All epochs are done: what the same Trainer trains from now on is another's."""
        self.num_epochs = self._trainer.state.num_train_epochs
        self._final = copy.deepcopy(self._present())

    def _present(self) -> dict[str, Any]:
        trainer = self._trainer
        of_process = ("is_local_process_zero", "is_world_process_zero")
        state = dataclasses.asdict(trainer.state)
        return {
            "epochs": self.num_epochs,
            "state": {name: value for name, value in state.items() if name not in of_process},
            "callbacks": [callback.state() for callback in self._callbacks()],
            "losses": [
                trainer._tr_loss.item(),
                trainer._total_loss_scalar,
                trainer._globalstep_last_logged,
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """It is put in its place when Trainer is ready."""
        self._saved = state

    def put_back_state(self) -> None:
        """Where Trainer is, and what callbacks hold."""
        if self._saved is None:
            return
        self.num_epochs = self._saved["epochs"]
        for name, value in self._saved["state"].items():
            setattr(self._trainer.state, name, copy.deepcopy(value))
        for callback, state in zip(self._callbacks(), self._saved["callbacks"], strict=True):
            for name, value in {**state["args"], **state["attributes"]}.items():
                setattr(callback, name, value)

    def put_back_losses(self) -> None:
        """What was added up since they were logged, and in all."""
        if self._saved is None:
            return
        trainer = self._trainer
        latest, total, last_logged = self._saved["losses"]
        if trainer.fleet_trial.rank == 0:
            trainer._tr_loss.fill_(latest)
            trainer._total_loss_scalar = total
        trainer._globalstep_last_logged = last_logged
        trainer._initial_global_step = 0
        trainer.args.eval_on_start = False  # it was done
        history = trainer.state.log_history
        if history and "train_loss" in history[-1]:
            history.pop()  # all was done, and that is said once more

    def _callbacks(self) -> list[Any]:
        trainer = self._trainer
        everyone = [*trainer.callback_handler.callbacks, trainer.control]
        return [callback for callback in everyone if isinstance(callback, ExportableState)]
