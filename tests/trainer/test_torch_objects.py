"""Every optimizer and scheduler of torch goes on from a checkpoint as if nothing had happened."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

from optuna_fleet.checkpoints.file import Owner
from optuna_fleet.trainer.checkpoints import checkpoint
from optuna_fleet.trainer.checkpoints.checkpoint import Checkpoint
from optuna_fleet.trainer.checkpoints.states import state_of


def all_of(module: Any, base: type, *besides: type) -> list[Any]:
    found = [kind for _, kind in inspect.getmembers(module, inspect.isclass)]
    return [kind for kind in found if issubclass(kind, (base, *besides)) and kind is not base]


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 4, 4, 6]),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda epoch: 0.9),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=20),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o), schedulers.MultiStepLR(o, [2, 4])], [1]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.LinearLR(o), schedulers.MultiStepLR(o, [2, 4])]
    ),
    "StepLR": lambda o: schedulers.StepLR(o, 2),
    "SWALR": lambda o: SWALR(o, 0.05),
}
OTHERS = all_of(schedulers, schedulers.LRScheduler, schedulers.ReduceLROnPlateau)
SCHEDULERS = {kind.__name__: kind for kind in OTHERS if kind.__name__[0] != "_"} | SCHEDULERS
OPTIMIZERS = all_of(torch.optim, torch.optim.Optimizer)


def model_for(optimizer: type) -> torch.nn.Module:
    torch.manual_seed(0)
    if optimizer.__name__ == "SparseAdam":
        return torch.nn.Embedding(3, 2, sparse=True)
    return torch.nn.Linear(3, 2, bias=optimizer.__name__ != "Muon")  # which takes matrices only


def step(model: torch.nn.Module, optimizer: Any) -> None:
    sparse = isinstance(model, torch.nn.Embedding)
    x = torch.tensor([0, 2]) if sparse else torch.arange(6.0).view(2, 3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


def through_a_file(path: Path, *objects: Any) -> list[dict[str, Any]]:
    content = Checkpoint(
        loop=1,
        epoch=1,
        objects=[state_of(thing) for thing in objects],
        state={},
        rng=[],
        history={},
    )
    owner = Owner(study="sweep", trial=0)
    with path.open("w+b") as file:
        checkpoint.write(file, checkpoint.snapshot(content), owner)
    return checkpoint.load(path, owner).objects


def same(left: Any, right: Any) -> bool:
    """Whether both are equal to the types of all that is in them."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_an_optimizer_goes_on(tmp_path: Path, kind: Any) -> None:
    model = model_for(kind)
    optimizer = kind(model.parameters(), lr=0.1)
    step(model, optimizer)
    states = through_a_file(tmp_path / "c", model, optimizer)
    twin = model_for(kind)
    resumed = kind(twin.parameters(), lr=0.1)
    for thing, state in zip((twin, resumed), states, strict=True):
        thing.load_state_dict(state)
    assert same(resumed.state_dict(), optimizer.state_dict())
    for one, its in ((model, optimizer), (twin, resumed)):
        step(one, its)
    assert torch.equal(twin.weight, model.weight)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.filterwarnings("ignore:To get the last learning rate")
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # torch 2.4, itself
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_goes_on(tmp_path: Path, name: str) -> None:
    def start() -> tuple[Any, Any]:
        optimizer = torch.optim.SGD(torch.nn.Linear(3, 2).parameters(), lr=0.1, momentum=0.9)
        return optimizer, SCHEDULERS[name](optimizer)

    def go_on(optimizer: Any, scheduler: Any) -> list[float]:
        rates = []
        for _ in range(5):
            optimizer.step()
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    objects = start()
    go_on(*objects)
    resumed = start()
    for thing, state in zip(resumed, through_a_file(tmp_path / "c", *objects), strict=True):
        thing.load_state_dict(state)
    assert same(resumed[1].state_dict(), objects[1].state_dict())
    assert go_on(*resumed) == go_on(*objects)
