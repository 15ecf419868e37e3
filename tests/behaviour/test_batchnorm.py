"""BatchNorm on two devices is that of one, wherever it is called, and layers stay as they are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.behaviour.harness import moment
from tests.behaviour.parts import train_on
from tests.behaviour.words import pytestmark  # noqa: F401

OWN = F.batch_norm, nn.SyncBatchNorm.forward


class Net(nn.Module):
    """Two norms, of a kind that is given, and what some objectives do between them."""

    def __init__(self, kind: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 3, 3, bias=False), kind(3)
        self.second, self.last = nn.Conv2d(3, 3, 2, bias=False), kind(3)
        self.head = nn.Linear(27, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("var", torch.ones(3))

    def body(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.norm(self.first(x)).relu())).relu()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).flatten(1))


class Activated(nn.BatchNorm2d):
    """With a forward of its own, as in timm."""

    def forward(self, x: Tensor) -> Tensor:
        given = (self.running_mean, self.running_var, self.weight, self.bias)
        return F.leaky_relu(F.batch_norm(x, *given, self.training, 0.2, self.eps))


Step = Callable[[Tensor], Tensor]


def plain(model: Net) -> Step:
    return model


def frozen_by_type(model: Net) -> Step:
    """Norms keep what they have seen so far."""
    for layer in model.modules():
        if type(layer) is nn.BatchNorm2d:
            layer.eval()
    return model


def by_hand(model: Net) -> Step:
    def step(x: Tensor) -> Tensor:
        x = F.batch_norm(model.first(x), model.mean, model.var, training=model.training)
        return model.head(model.second(x).flatten(1))

    return step


def of_functional_parameters(model: Net) -> Step:
    """As in meta learning."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return lambda x: torch.func.functional_call(model, tensors, x)


def checkpointed(model: Net, *, reentrant: bool) -> Step:
    def step(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return model.head(checkpoint(model.body, x, use_reentrant=reentrant).flatten(1))

    return step


CASES: dict[str, tuple[Callable[[int], nn.Module], Callable[[Net], Step]]] = {
    "plain": (nn.BatchNorm2d, plain),
    "own forward": (Activated, plain),
    "torch's own": (nn.SyncBatchNorm, plain),
    "without statistics": (functools.partial(nn.BatchNorm2d, track_running_stats=False), plain),
    "frozen by type": (nn.BatchNorm2d, frozen_by_type),
    "by hand": (nn.BatchNorm2d, by_hand),
    "functional call": (nn.BatchNorm2d, of_functional_parameters),
    "checkpointed": (nn.BatchNorm2d, functools.partial(checkpointed, reentrant=False)),
    "checkpointed, reentrant": (nn.BatchNorm2d, functools.partial(checkpointed, reentrant=True)),
}


def trains(trial: Any, *, case: str) -> None:
    """For two epochs of five steps."""
    kind, begins = CASES[case]
    model = trial.prepare(Net(kind).double())
    optimizer = trial.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    step = begins(model.train())
    for _ in trial.epochs(2):
        for x, y in trial.batches("train_odd", batch_size=10, movable=True):
            train_on(trial, step, optimizer, x + 1, y)
            moment(trial)
    trial.set_user_attr("buffers", [float(b.double().sum()) for b in model.buffers()])


@pytest.mark.parametrize("case", CASES)
def test_two_devices_train_as_one(lab: Any, case: str) -> None:
    objective = functools.partial(trains, case=case)
    told = ["use_reentrant=False exchanges them once"] if "reentrant" in case else []
    lab.same(objective, [2], told=told)
    lab.same(objective, [1, 2, 1], within={1, 7}, told=told)


def looks(trial: Any) -> float:
    return float(F.batch_norm is OWN[0] and nn.SyncBatchNorm.forward is OWN[1])


def test_torchs_own_functions_are_back_after_a_trial(lab: Any) -> None:
    lab.fly(functools.partial(trains, case="torch's own"), [2])
    assert lab.fly(looks, [1]).trial.value == 1
