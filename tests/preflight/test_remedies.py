"""The check says what docs/objective.md says, and lets go what is mended as told there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from tests.behaviour.words import pytestmark  # noqa: F401
from tests.preflight.table import BATCH, EPOCHS, prepared, scorer, sgd, step

WEIGHTS = torch.tensor([1.0, 2.0, 5.0])
REMEDIES: dict[str, Callable[..., Any]] = {}


def remedy(says: str) -> Callable[[Any], Any]:
    """Of an objective, which is `mended` or not: what it says if it is not."""

    def enter(objective: Any) -> Any:
        REMEDIES[says] = objective
        return objective

    return enter


def batches(trial: Any, **options: Any) -> Any:
    return ((x, y) for x, y, _ in trial.batches("train_table", BATCH, **options))


def trains(trial: Any, model: Any, optimizer: Any) -> None:
    for x, y in batches(trial):
        step(optimizer, F.cross_entropy(model(x), y))


@remedy("one device: on several the gradient `model.scorer.weight` differs")
def weighs_classes(trial: Any, *, mended: bool) -> None:
    model, optimizer = prepared(trial, scorer())
    for _ in trial.epochs(EPOCHS):
        for x, y in batches(trial):
            loss = F.cross_entropy(model(x), y, weight=WEIGHTS.to(x.dtype))
            step(optimizer, trial.weighted(loss, WEIGHTS[y].sum()) if mended else loss)


@remedy("in step 2 of mini-epoch 1")
def centres_outputs(trial: Any, *, mended: bool) -> None:
    model, optimizer = prepared(trial, scorer())
    trial.state.setdefault("center", torch.zeros(3))
    for _ in trial.epochs(EPOCHS):
        for x, y in batches(trial):
            outputs = model(x)
            step(optimizer, F.cross_entropy(outputs - trial.state["center"], y))
            center = outputs.detach().mean(0)
            center = trial.mean(center, weight=trial.shard_size) if mended else center
            trial.state["center"] = (trial.state["center"] + center) / 2


@remedy("the state of the object `scheduler['best']` differs")
def schedules_by_loss(trial: Any, *, mended: bool) -> None:
    model = scorer()
    optimizer = sgd(model)
    scheduler = ReduceLROnPlateau(optimizer, patience=0)
    trial.prepare(model, optimizer, scheduler)
    for _ in trial.epochs(EPOCHS):
        for x, y in batches(trial):
            loss = F.cross_entropy(model(x), y)
            step(optimizer, loss)
            value = loss.item()
            scheduler.step(trial.mean(value, weight=trial.shard_size) if mended else value)


@remedy("ranks have come apart: trial.state['counts'] differ")
def counts_classes(trial: Any, *, mended: bool) -> None:
    model, optimizer = prepared(trial, scorer())
    trial.state.setdefault("counts", torch.zeros(3))
    for _ in trial.epochs(EPOCHS):
        for x, y in batches(trial):
            step(optimizer, F.cross_entropy(model(x), y))
            counts = torch.bincount(y[: trial.shard_size], minlength=3)
            trial.state["counts"] += trial.sum(counts) if mended else counts


@remedy("the reported value `of step 0` differs")
def reports_accuracy(trial: Any, *, mended: bool) -> None:
    model, optimizer = prepared(trial, scorer())
    for epoch in trial.epochs(EPOCHS):
        trains(trial, model, optimizer)
        correct = total = 0
        for x, y, _ in trial.batches("val_table", BATCH):
            correct += int((model(x).argmax(1) == y).sum())
            total += len(y)
        mean = trial.mean(correct / max(1, total))
        trial.report(trial.sum(correct) / trial.sum(total) if mended else mean, epoch)


@remedy("one device: on several it fails: TrialError: Gradients of one step come, or may come,")
def fetches_ahead(trial: Any, *, mended: bool) -> None:
    model, optimizer = prepared(trial, scorer())
    for _ in trial.epochs(EPOCHS):
        earlier: list[tuple[Tensor, Tensor, int]] = []
        for x, y in batches(trial):
            earlier.append((x, y, trial.shard_size))
            if len(earlier) == 2:
                x, y, size = earlier.pop(0)
                loss = F.cross_entropy(model(x), y)
                weighted = trial.weighted(loss, size, fetched_ahead=True) if mended else loss
                step(optimizer, weighted)


@remedy("not moved: `history` would begin anew")
def keeps_history(trial: Any, *, mended: bool) -> int:
    model, optimizer = prepared(trial, scorer())
    history: list[int] = trial.state.setdefault("history", []) if mended else []
    for epoch in trial.epochs(EPOCHS):
        trains(trial, model, optimizer)
        history.append(epoch)
    return len(history)


@remedy("not moved: `scheduler.last_epoch`")
def schedules(trial: Any, *, mended: bool) -> None:
    model = scorer()
    optimizer = sgd(model)
    scheduler = StepLR(optimizer, 1, 0.5)
    trial.prepare(model, optimizer, *([scheduler] if mended else []))
    for _ in trial.epochs(EPOCHS):
        trains(trial, model, optimizer)
        scheduler.step()


class Centred(nn.Module):
    def __init__(self, *, is_buffer: bool) -> None:
        super().__init__()
        self.inner = scorer()
        self.center: Tensor
        if is_buffer:
            self.register_buffer("center", torch.zeros(3))
        else:
            self.center = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) - self.center  # type: ignore[no-any-return]


@remedy("not moved: `model.center`")
def has_attribute(trial: Any, *, mended: bool) -> None:
    model, optimizer = prepared(trial, Centred(is_buffer=mended))
    for _ in trial.epochs(EPOCHS):
        for x, y in batches(trial):
            outputs = model(x)
            step(optimizer, F.cross_entropy(outputs, y))
            model.center = trial.mean(outputs.detach().mean(0), weight=trial.shard_size)


@pytest.mark.parametrize("says", list(REMEDIES))
def test_what_is_mended_as_told_is_let_go(check: Any, says: str) -> None:
    objective = REMEDIES[says]
    told = str(check(functools.partial(objective, mended=False)))
    assert says in told
    verdict = check(functools.partial(objective, mended=True))
    assert verdict.may_widen, verdict
    assert verdict.may_move, verdict
