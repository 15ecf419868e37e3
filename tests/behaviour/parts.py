"""What objectives are made of: small data sets and models, loops, and notes of losses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

from optuna_fleet import SharedPipeline
from tests.behaviour.small import Noise, evaluate

EPOCHS = 3

# -- data, all in float64 -------------------------------------------------------------------------


class Triples(torch.utils.data.Dataset[tuple[Tensor, Tensor, Tensor]]):
    """An image, another view of it, another image."""

    def __init__(self, size: int) -> None:
        self.images = Noise(size)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        image, _ = self.images[index]
        view = image + 0.3 * torch.randn(image.shape, dtype=image.dtype)
        return image, view, self.images[(index + 1) % len(self)][0]


class Sentences(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Tokens from 1 to 9, padded with 0, and their number: two in three are one token long."""

    def __init__(self, size: int) -> None:
        self.tokens = torch.randint(1, 10, (size, 8), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        length = 3 + index % 5 if index % 3 == 0 else 1
        return self.tokens[index] * (torch.arange(8) < length), length


class Numbered(Noise):
    """Gives the number of each sample in the place of a label."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return super().__getitem__(index)[0], index


class Rows(torch.utils.data.Dataset[Any]):
    """Rows with a class, and their own number; or each of so many is None."""

    def __init__(self, size: int, *, none_of: int | None = None) -> None:
        generator = torch.Generator().manual_seed(size)
        self.rows = torch.randn(size, 6, generator=generator, dtype=torch.float64)
        classes = torch.randn(6, 3, generator=torch.Generator().manual_seed(1)).double()
        self.classes = (self.rows @ classes).argmax(1)
        self.none_of = none_of

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        if self.none_of and index % self.none_of == 0:
            return None
        return self.rows[index], self.classes[index], index


def without_none(samples: list[Any]) -> Any:
    return default_collate([sample for sample in samples if sample is not None])


def some_twice(samples: list[Any]) -> Any:
    return default_collate([*samples, *(sample for sample in samples if sample[1] == 0)])


def usual_pipeline(collates: dict[str, Any] | None = None, **more: Any) -> SharedPipeline:
    """By tens and sevens the last batches are one sample or two: fewer than three ranks.

    Args:
        collates: Of data sets of others.
        more: These data sets.
    """
    return SharedPipeline(
        train=Noise(42, augment=True),
        train_triples=Triples(29),
        train_odd=Noise(41, augment=True),
        train_text=Sentences(42),
        train_numbered=Numbered(41, augment=True),
        train_rows=Rows(101),
        train_none=Rows(64, none_of=3),
        train_twice=Rows(64),
        val=Noise(20),
        collate_fn={"train_none": without_none, "train_twice": some_twice, **(collates or {})},
        **more,
    )


# -- models ---------------------------------------------------------------------------------------


def convnet() -> nn.Sequential:
    return nn.Sequential(
        # A bias before BatchNorm has no gradient but rounding, of which Adam would make steps.
        nn.Conv2d(1, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 3),
    ).double()


def perceptron(inputs: int = 36, outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs)
    ).double()


def linear(inputs: int = 6, outputs: int = 6, **options: Any) -> nn.Linear:
    return nn.Linear(inputs, outputs, **options).double()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def prepared(trial: Any, make_model: Any = convnet, make_optimizer: Any = sgd) -> Any:
    model = make_model()
    return trial.prepare(model, make_optimizer(model.parameters()))


# -- what is noted --------------------------------------------------------------------------------


def note(trial: Any, loss: Tensor, weight: Any = None) -> float:
    """Adds the mean of a loss over the ranks to what was seen."""
    weight = trial.shard_size if weight is None else weight
    mean = float(trial.mean(loss.item(), weight=weight))
    trial.state.setdefault("seen", []).append(mean)
    return mean


def note_weighted(trial: Any, loss: Tensor, weight: Tensor) -> None:
    """What stands in for a rank without samples has no weight."""
    note(trial, loss, weight if trial.shard_size else 0)


def note_evaluation(trial: Any, model: Any) -> float:
    """The mean loss over the validation data."""

    def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs, labels, reduction="sum")

    loss = evaluate(trial, model, loss_of) / 20
    trial.state["seen"].append(loss)
    model.train()
    return loss


def note_weights(trial: Any, *modules: nn.Module) -> None:
    weights = [v.double().tolist() for m in modules for v in m.state_dict().values()]
    trial.set_user_attr("weights", weights)


# -- loops ----------------------------------------------------------------------------------------


def step(optimizer: Any, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def train_on(trial: Any, model: Any, optimizer: Any, images: Tensor, labels: Tensor) -> float:
    loss = F.cross_entropy(model(images), labels)
    step(optimizer, loss)
    return note(trial, loss)


def each_batch(
    *make: Any, epochs: int = EPOCHS, evaluates: bool = False, data: str = "train", **options: Any
) -> Callable[[Any], Any]:
    """Makes an objective of what one does with a trial, a model, its optimizer and a batch."""

    def objective_of(does: Callable[..., Any]) -> Any:
        @functools.wraps(does)
        def objective(trial: Any) -> None:
            model, optimizer = prepared(trial, *make)
            for _ in trial.epochs(epochs):
                for batch in trial.batches(data, **{"batch_size": 10, **options}):
                    does(trial, model, optimizer, *batch)
                if evaluates:
                    note_evaluation(trial, model)

        return objective

    return objective_of


def each_loss(*make: Any, **options: Any) -> Callable[[Any], Any]:
    """The same of the loss of a model and a batch."""

    def objective_of(loss_of: Callable[..., Tensor]) -> Any:
        def trains(trial: Any, model: Any, optimizer: Any, *batch: Any) -> None:
            loss = loss_of(model, *batch)
            step(optimizer, loss)
            note(trial, loss)

        return each_batch(*make, **options)(functools.wraps(loss_of)(trains))

    return objective_of


def fits(
    trial: Any,
    modules: Sequence[nn.Module],
    loss_of: Callable[..., Tensor],
    *,
    data: str = "train_rows",
    accumulates: int = 1,
) -> None:
    """The plain loop around a loss of rows, classes and numbers; notes losses and weights."""
    optimizer = torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.3)
    trial.prepare(*modules, optimizer)
    for _ in trial.epochs(EPOCHS):
        batches = trial.batches(data, batch_size=16)
        for k, batch in enumerate(batches, 1):
            loss = loss_of(*batch)
            (loss / accumulates).backward()
            note(trial, loss)
            if k % accumulates == 0 or k == len(batches):
                optimizer.step()
                optimizer.zero_grad()
    note_weights(trial, *modules)


def ahead(batches: Iterable[Any], number: int) -> Iterator[Any]:
    """As a prefetcher does: the batches, of which that many more are fetched already."""
    queue: list[Any] = []
    for batch in batches:
        queue.append(batch)
        if len(queue) > number:
            yield queue.pop(0)
    yield from queue


def with_sizes(trial: Any, batches: Iterable[Any]) -> Iterator[tuple[Any, int]]:
    """What is trained on later must be logged with what `trial.shard_size` is now."""
    for batch in batches:
        yield batch, trial.shard_size
