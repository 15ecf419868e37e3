"""What usual objectives are made of: small data sets and models, steps, and notes of losses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

from optuna_fleet import SharedPipeline
from tests.behaviour.small import Noise, evaluate

EPOCHS = 3
OBJECTIVES: dict[str, Callable[[Any], Any]] = {}


def usual(objective: Callable[[Any], Any]) -> Callable[[Any], Any]:
    OBJECTIVES[objective.__name__] = objective
    return objective


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


COLLATES = {
    "train_none": without_none,
    "train_twice": some_twice,
}


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
        val_rows=Rows(40),
        collate_fn=COLLATES | (collates or {}),
        **more,
    )


# -- parts ----------------------------------------------------------------------------------------


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


def pixelwise() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 1, 1)).double()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def prepared(trial: Any, make_model: Any = convnet, make_optimizer: Any = sgd) -> Any:
    model = make_model()
    return trial.prepare(model, make_optimizer(model.parameters()))


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


def step(optimizer: Any, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def train_on(trial: Any, model: Any, optimizer: Any, images: Tensor, labels: Tensor) -> float:
    loss = F.cross_entropy(model(images), labels)
    step(optimizer, loss)
    return note(trial, loss)


def with_sizes(trial: Any, batches: Iterable[Any]) -> Iterator[tuple[Any, int]]:
    """What is trained on later must be logged with what `trial.shard_size` is now."""
    for batch in batches:
        yield batch, trial.shard_size
