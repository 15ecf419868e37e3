"""What the check must tell apart, one clear case of each kind."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optuna_fleet import SharedPipeline
from optuna_fleet.preflight.standalone import Checker
from optuna_fleet.preflight.verdict import (
    Free,
    NotChecked,
    NotMoved,
    NotRepeatable,
    OneDevice,
    Plain,
    Verdict,
)
from tests.preflight.conftest import Check

Objective = Callable[[Any], Any]


class Rows(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Rows in float32, and their classes."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(6, generator=generator), index % 3


@pytest.fixture(scope="module")
def rows() -> SharedPipeline:
    return SharedPipeline(train=Rows(), val=Rows())


@pytest.fixture
def judge(check: Check, rows: SharedPipeline) -> Callable[[Objective], Verdict]:
    return lambda objective: check(objective, rows)


def model_of(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), *layers, nn.Linear(8, 3))


def trained(trial: Any, **optimizer: Any) -> tuple[Any, Any]:
    model = model_of()
    return trial.prepare(model, torch.optim.Adam(model.parameters(), **{"lr": 0.01, **optimizer}))


def epoch_of(
    trial: Any, model: Any, optimizer: Any, loss: Any = F.cross_entropy, **how: Any
) -> None:
    model.train()
    for x, y in trial.batches("train", batch_size=10, **how):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()


def accuracy(trial: Any, model: Any) -> float:
    model.eval()
    with torch.no_grad():
        right = sum(
            int((model(x).argmax(1) == y).sum()) for x, y in trial.batches("val", batch_size=10)
        )
    return trial.sum(right) / 60


def loss_on_val(trial: Any, model: Any) -> float:
    model.eval()
    with torch.no_grad():
        losses = [
            float(F.cross_entropy(model(x), y, reduction="sum"))
            for x, y in trial.batches("val", batch_size=10)
        ]
    return trial.sum(sum(losses)) / 60


# -- good ones ------------------------------------------------------------------------------------


def good(trial: Any) -> float:
    model, optimizer = trained(trial, lr=trial.suggest_float("lr", 1e-3, 1e-1, log=True))
    scheduler = trial.prepare(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30))
    for epoch in trial.epochs(30):
        epoch_of(trial, model, optimizer)
        scheduler.step()
        trial.report(accuracy(trial, model), epoch)
        if trial.should_prune():
            raise AssertionError("nothing prunes here")
    return trial.best_value  # type: ignore[no-any-return]


def accumulates(trial: Any) -> None:
    model, optimizer = trained(trial)
    for _ in trial.epochs(4):
        for step, (x, y) in enumerate(trial.batches("train", batch_size=10)):
            (F.cross_entropy(model(x), y) / 4).backward()
            if step % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()


def with_totals(trial: Any) -> None:
    model, optimizer = trained(trial)
    for epoch in trial.epochs(5):
        for x, y in trial.batches("train", batch_size=10, movable=True):
            loss = F.cross_entropy(model(x), y)
            trial.totals["loss"] += loss.detach() * trial.shard_size
            trial.totals["samples"] += trial.shard_size
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        trial.report(trial.totals.mean("loss", "samples"), epoch)


def with_autocast(trial: Any) -> None:
    model, optimizer = trained(trial)
    scaler = torch.amp.GradScaler("cpu")
    trial.prepare(scaler)
    for _ in trial.epochs(4):
        for x, y in trial.batches("train", batch_size=10):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


def in_float32(trial: Any) -> None:
    model, optimizer = trained(trial)
    for _ in trial.epochs(4):
        for x, y in trial.batches("train", batch_size=10):
            assert x.dtype == torch.float32
            optimizer.zero_grad()
            F.cross_entropy(model(x.float()), y).backward()
            optimizer.step()


def with_noise(trial: Any) -> None:
    model = model_of(nn.Dropout(0.3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trial.prepare(model, optimizer)
    for _ in trial.epochs(4):
        for x, y in trial.batches("train", batch_size=10):
            optimizer.zero_grad()
            F.cross_entropy(model(x + 0.1 * torch.randn_like(x)), y).backward()
            optimizer.step()


def in_steps(trial: Any) -> None:
    model, optimizer = trained(trial)
    for period in trial.steps(40, every=8):
        epoch_of(trial, model, optimizer)
        trial.report(accuracy(trial, model), period)


def of_two_loops(trial: Any) -> None:
    model, optimizer = trained(trial)
    for _ in trial.epochs(4):
        epoch_of(trial, model, optimizer)
    model[0].requires_grad_(False)
    for _ in trial.epochs(4):
        epoch_of(trial, model, optimizer)


def wants_two_devices(trial: Any) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trial.prepare(model, optimizer, min_devices=2)
    for _ in trial.epochs(4):
        epoch_of(trial, model, optimizer)


def has_rare_branch(trial: Any) -> None:
    first, second = nn.Linear(6, 3), nn.Linear(6, 3)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    trial.prepare(first, second, optimizer)
    for _ in trial.epochs(4):
        for x, y in trial.batches("train", batch_size=10):
            far = x[:, 0] > 1.0
            out = first(x)
            if far.any():
                out = out + far[:, None] * second(x)
            optimizer.zero_grad()
            F.cross_entropy(out, y).backward()
            optimizer.step()


@pytest.mark.parametrize(
    "objective",
    [
        *(good, accumulates, with_totals, with_autocast, in_float32, with_noise, in_steps),
        *(of_two_loops, wants_two_devices, has_rare_branch),
    ],
)
def test_good_ones_may_do_all(objective: Objective, judge: Callable[[Objective], Verdict]) -> None:
    verdict = judge(objective)
    assert isinstance(verdict, Free), verdict
    assert verdict.worst < 1e-2 if objective is in_float32 else verdict.worst < 1e-9


# -- on several devices ---------------------------------------------------------------------------


def weighs_classes(trial: Any) -> None:
    model, optimizer = trained(trial)
    weights = torch.tensor([1.0, 5.0, 1.0])
    for _ in trial.epochs(4):
        epoch_of(trial, model, optimizer, functools.partial(F.cross_entropy, weight=weights))


def weighs_classes_late(trial: Any) -> None:
    model, optimizer = trained(trial)
    for epoch in trial.epochs(30):
        weights = torch.tensor([1.0, 5.0, 1.0]) if epoch > 10 else None
        epoch_of(trial, model, optimizer, functools.partial(F.cross_entropy, weight=weights))


class Codebook(nn.Module):
    """Moves its codes towards what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 4)
        self.outer = nn.Linear(4, 3)
        self.register_buffer("codes", torch.randn(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        z = self.inner(x)
        nearest = torch.cdist(z, self.codes).argmin(1)
        code = self.codes[nearest]
        if self.training:
            with torch.no_grad():
                for one in nearest.unique():
                    self.codes[one].lerp_(z[nearest == one].mean(0), 0.3)
        return self.outer(z + (code - z).detach())  # type: ignore[no-any-return]


def follows_data(trial: Any) -> None:
    model = Codebook()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trial.prepare(model, optimizer)
    for _ in trial.epochs(4):
        epoch_of(trial, model, optimizer)


def means_of_means(trial: Any) -> None:
    model, optimizer = trained(trial)
    for epoch in trial.epochs(4):
        epoch_of(trial, model, optimizer)
        model.eval()
        with torch.no_grad():
            losses = [
                float(F.cross_entropy(model(x), y)) for x, y in trial.batches("val", batch_size=10)
            ]
        trial.report(trial.mean(sum(losses) / len(losses)), epoch)


def hangs(trial: Any) -> None:
    model, optimizer = trained(trial)
    for _ in trial.epochs(4):
        if trial.world_size > 1 and trial.rank == 1:
            time.sleep(3600)
        epoch_of(trial, model, optimizer)


def aborts(trial: Any) -> None:
    model, optimizer = trained(trial)
    for _ in trial.epochs(4):
        if trial.world_size > 1 and trial.rank == 1:
            os.kill(os.getpid(), signal.SIGABRT)
        epoch_of(trial, model, optimizer)


@pytest.mark.parametrize(
    ("objective", "words"),
    [
        (weighs_classes, ("gradient `model.", "in step 1 of mini-epoch 1", "class weights")),
        (
            weighs_classes_late,
            (
                "gradient `model.",
                "in step 1 of mini-epoch 2",
            ),
        ),
        (follows_data, ("in step 2 of mini-epoch 1", "a codebook")),
        (means_of_means, ("reported value", "trial.shard_size")),
        (aborts, ("it fails", "SIGABRT")),
    ],
)
def test_what_differs_on_several_devices_is_told(
    objective: Objective, words: tuple[str, ...], judge: Callable[[Objective], Verdict]
) -> None:
    verdict = judge(objective)
    assert isinstance(verdict, OneDevice), verdict
    assert verdict.may_move
    for text in words:
        assert text in str(verdict)


def test_what_hangs_on_several_devices_stays_on_one(rows: SharedPipeline) -> None:
    with Checker(least_s=15.0) as checker:
        verdict = checker.check(hangs, rows)
    assert isinstance(verdict, OneDevice), verdict
    assert "did not end in time" in str(verdict)


# -- over moves -----------------------------------------------------------------------------------


def keeps_best(trial: Any) -> float:
    model, optimizer = trained(trial)
    best = float("inf")
    for epoch in trial.epochs(20):
        epoch_of(trial, model, optimizer)
        value = loss_on_val(trial, model)
        best = min(best, value)
        trial.report(value, epoch)
    return best


def leaves_scheduler(trial: Any) -> None:
    model, optimizer = trained(trial)
    sched = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in trial.epochs(4):
        epoch_of(trial, model, optimizer)
        sched.step()


def sums_locally(trial: Any) -> None:
    model, optimizer = trained(trial)
    for epoch in trial.epochs(4):
        total = 0.0
        for x, y in trial.batches("train", batch_size=10, movable=True):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * trial.shard_size
        trial.report(trial.sum(total) / 60, epoch)


class Centred(nn.Module):
    """Keeps a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.center = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) - self.center  # type: ignore[no-any-return]


def keeps_attribute(trial: Any) -> None:
    model = Centred()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trial.prepare(model, optimizer)
    for _ in trial.epochs(4):
        epoch_of(trial, model, optimizer)
        model.center = 0.9 * model.center + model.layer.bias.detach()


@pytest.mark.parametrize(
    ("objective", "words"),
    [
        (keeps_best, ("`best`", "trial.best_value")),
        (leaves_scheduler, ("sched.last_epoch",)),
        (sums_locally, ("`total`", "trial.totals")),
        (keeps_attribute, ("model.center", "buffers")),
    ],
)
def test_what_begins_anew_is_named(
    objective: Objective, words: tuple[str, ...], judge: Callable[[Objective], Verdict]
) -> None:
    verdict = judge(objective)
    assert isinstance(verdict, NotMoved), verdict
    assert verdict.may_widen
    for text in words:
        assert text in str(verdict)


# -- what can't be checked ------------------------------------------------------------------------


def draws_anew(trial: Any) -> None:
    torch.manual_seed(time.time_ns() % 2**31)
    model, optimizer = trained(trial)
    for _ in trial.epochs(4):
        epoch_of(trial, model, optimizer)


def test_what_is_not_repeatable_is_told(judge: Callable[[Objective], Verdict]) -> None:
    assert isinstance(judge(draws_anew), NotRepeatable)


def raises(trial: Any) -> None:
    trained(trial)
    raise ArithmeticError("of the user's")


def test_what_raises_is_not_checked(judge: Callable[[Objective], Verdict]) -> None:
    verdict = judge(raises)
    assert isinstance(verdict, NotChecked)
    assert "ArithmeticError: of the user's" in str(verdict)
    assert "in raises" in str(verdict)


def prepares_nothing(trial: Any) -> float:
    return float(trial.suggest_float("x", 0.0, 1.0))


def test_what_prepares_nothing_is_plain(judge: Callable[[Objective], Verdict]) -> None:
    assert isinstance(judge(prepares_nothing), Plain)


def test_clocks_are_no_difference(judge: Callable[[Objective], Verdict]) -> None:
    def timed(trial: Any) -> None:
        model, optimizer = trained(trial)
        began = time.time()
        for _ in trial.epochs(4):
            epoch_of(trial, model, optimizer)
            took = time.time() - began
        del took

    assert isinstance(judge(timed), Free)
