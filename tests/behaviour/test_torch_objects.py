"""Every optimizer and scheduler of torch goes on elsewhere as if nothing had happened."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

from tests.behaviour.parts import note


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
OPTIMIZERS = [k for k in all_of(torch.optim, torch.optim.Optimizer) if k.__name__ != "LBFGS"]


def optimizes(trial: Any, *, dtype: torch.dtype = torch.float64) -> None:
    """One model after the other, each with another optimizer."""
    for kind in OPTIMIZERS:
        torch.manual_seed(0)
        is_sparse = kind.__name__ == "SparseAdam"
        body = nn.Linear(36, 3, bias=kind.__name__ != "Muon")  # which takes matrices only
        model = (nn.Embedding(41, 3, sparse=True) if is_sparse else body).to(dtype)
        model, optimizer = trial.prepare(model, kind(model.parameters(), lr=0.01))
        for _ in trial.epochs(3):
            for images, numbers in trial.batches("train_numbered", batch_size=20):
                loss = F.cross_entropy(
                    model(numbers if is_sparse else images.flatten(1).to(dtype)), numbers % 3
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                note(trial, loss)


def schedules(trial: Any) -> None:
    for make in SCHEDULERS.values():
        model = nn.Linear(36, 3).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer, scheduler = trial.prepare(model, optimizer, make(optimizer))
        for _ in trial.epochs(3):
            for images, labels in trial.batches("train", batch_size=21):
                loss = F.cross_entropy(model(images.flatten(1)), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                loss = note(trial, loss)
                is_led = isinstance(scheduler, schedulers.ReduceLROnPlateau)
                scheduler.step(*([loss] if is_led else []))
                trial.state["seen"].append(optimizer.param_groups[0]["lr"])


# torch gives each floating point number of a state that it loads the type of the parameter: NAdam
# has one of float32.
in_float32 = functools.partial(optimizes, dtype=torch.float32)


# Each has two moments at which it may move.
@pytest.mark.filterwarnings("ignore:To get the last learning rate")
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # torch 2.4, itself
@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")
@pytest.mark.parametrize(
    ("objective", "kinds"), [(in_float32, OPTIMIZERS), (schedules, SCHEDULERS)]
)
def test_on_one_device_after_the_other_it_goes_on_bit_for_bit(
    lab: Any, objective: Any, kinds: Any
) -> None:
    lab.same(objective, [1] * (1 + 2 * len(kinds)), rel=0.0, absolute=0.0)


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")
def test_optimizers_go_on_on_other_numbers_of_devices(lab: Any) -> None:
    lab.same(optimizes, [1 + i % 2 for i in range(1 + 2 * len(OPTIMIZERS))])
