"""What the tables of objectives are made of, and the data that these train on, in float32."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from optuna_fleet import SharedPipeline
from optuna_fleet.preflight.verdict import Outcome
from tests.behaviour.parts import usual_pipeline

ANY, STAYS, ONE = Outcome.FREE, Outcome.NOT_MOVED, Outcome.ONE_DEVICE
UNREPEATABLE, UNCHECKED = Outcome.NOT_REPEATABLE, Outcome.NOT_CHECKED
PLAIN = Outcome.PLAIN

EPOCHS, BATCH = 9, 8


@dataclass(frozen=True)
class Case:
    """An objective, what the check must say of it, and words that a user must read then.

    Attributes:
        params: With these; None for any.
    """

    objective: Callable[[Any], Any]
    outcome: Outcome
    says: Sequence[str] = ()
    params: Mapping[str, Any] | None = None


class Table(dict[str, Case]):
    """Cases by name."""

    def case(self, outcome: Outcome, *says: str, **params: Any) -> Callable[[Any], Any]:
        """Enter an objective under its own name."""

        def enter(objective: Any) -> Any:
            self.add(objective.__name__, objective, outcome, *says, **params)
            return objective

        return enter

    def loss(self, outcome: Outcome, *says: str, **options: Any) -> Callable[[Any], Any]:
        """Enter the plain loop around a loss of a model, rows, classes and numbers."""

        def enter(loss_of: Any) -> Any:
            self.add(loss_of.__name__, trains(loss_of, **options), outcome, *says)
            return loss_of

        return enter

    def remedy(self, outcome: Outcome, *says: str) -> Callable[[Any], Any]:
        """Enter an objective that is wrong, but if it is `mended` as docs/objective.md says."""

        def enter(objective: Any) -> Any:
            name, make = objective.__name__, functools.partial
            self.add(name, make(objective, mended=False), outcome, *says)
            self.add(f"{name}, mended", make(objective, mended=True), ANY)
            return objective

        return enter

    def add(self, name: str, objective: Any, outcome: Outcome, *says: str, **params: Any) -> None:
        assert name not in self, f"two are called {name}"
        self[name] = Case(objective, outcome, says, params or None)


# -- data -----------------------------------------------------------------------------------------


class Rows(torch.utils.data.Dataset[Any]):
    """Rows of six numbers with one of three classes, and their own number."""

    def __init__(self, size: int) -> None:
        self.rows = torch.randn(size, 6, generator=torch.Generator().manual_seed(size))
        self.classes = (self.rows[:, :3] + 0.5 * self.rows[:, 3:]).argmax(1)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index], self.classes[index], index


class Images(Rows):
    """Images of six by six pixels with their classes."""

    def __getitem__(self, index: int) -> Any:
        row, label, _ = super().__getitem__(index)
        return torch.outer(row, row.flip(0))[None], label


class Pixels(torch.utils.data.Dataset[Any]):
    """As many numbers as a scanned digit has pixels, with one of ten classes."""

    def __init__(self, size: int) -> None:
        self.pixels = torch.rand(size, 64, generator=torch.Generator().manual_seed(size))

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> Any:
        return self.pixels[index], index % 10


@functools.cache
def pipeline() -> SharedPipeline:
    """What `tests.behaviour` trains on, and what these tables do: by eights the last are three."""
    return usual_pipeline(
        train_table=Rows(43),
        val_table=Rows(19),
        train_images=Images(43),
        val_images=Images(20),
        train_digits=Pixels(75),
        val_digits=Pixels(40),
    )


# -- the plain loop -------------------------------------------------------------------------------


def scorer(outputs: int = 3) -> nn.Sequential:
    """A linear model; its parameters are called `scorer.weight` and `scorer.bias`."""
    return nn.Sequential(OrderedDict(scorer=nn.Linear(6, outputs)))


def network(*layers: nn.Module, bias: bool = True) -> nn.Sequential:
    """Two layers, `encoder` and `scorer`, and what is between them."""
    between = {f"layer{k}": layer for k, layer in enumerate(layers)} or {"tanh": nn.Tanh()}
    return nn.Sequential(
        OrderedDict(encoder=nn.Linear(6, 8, bias=bias), **between, scorer=nn.Linear(8, 3))
    )


def sgd(*modules: nn.Module, lr: float = 0.1, momentum: float = 0.0) -> torch.optim.Optimizer:
    parameters = [p for module in modules for p in module.parameters()]
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum)


def step(optimizer: Any, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def prepared(trial: Any, model: nn.Module, **options: Any) -> Any:
    return trial.prepare(model, sgd(model, **options))


def mean_of_classes(model: Any, x: Tensor, y: Tensor, *_: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def train(trial: Any, model: Any, optimizer: Any) -> None:
    """An epoch of the plain loop."""
    for x, y, _ in trial.batches("train_table", BATCH):
        step(optimizer, mean_of_classes(model, x, y))


def trains(
    loss_of: Callable[..., Tensor],
    make: Callable[[], nn.Module] = scorer,
    make_optimizer: Callable[[nn.Module], Any] = sgd,
    *,
    data: str = "train_table",
    drop_last: bool = False,
) -> Any:
    def objective(trial: Any) -> None:
        model = make()
        model, optimizer = trial.prepare(model, make_optimizer(model))
        for _ in trial.epochs(EPOCHS):
            for batch in trial.batches(data, BATCH, drop_last=drop_last):
                inputs = batch if isinstance(batch, list | tuple) else [batch]
                step(optimizer, loss_of(model, *inputs))

    return objective


def validation_loss(trial: Any, model: nn.Module) -> float:
    """The mean over all of the validation data, summed over the ranks."""
    model.eval()
    with torch.no_grad():
        total = sum(
            float(nn.functional.cross_entropy(model(x), y, reduction="sum"))
            for x, y, _ in trial.batches("val_table", BATCH)
        )
    model.train()
    return float(trial.sum(total)) / 19
