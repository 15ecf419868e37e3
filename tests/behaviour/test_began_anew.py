"""A trial that has moved tells once what of it began anew, and nothing if nothing did."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from tests.behaviour.harness import Flown, moment
from tests.behaviour.parts import prepared, train_on


def about(flown: Flown) -> list[str]:
    assert flown.error is None
    return [line for line in flown.told.splitlines() if "Trial 0" in line]


def has_patience(trial: Any) -> None:
    model, optimizer = prepared(trial)
    schedule = ExponentialLR(optimizer, 0.9)
    best, num_bad, history = math.inf, 0, list[float]()
    for epoch in trial.epochs(4):
        for images, labels in trial.batches("train", batch_size=10):
            train_on(trial, model, optimizer, images, labels)
        schedule.step()
        best, num_bad = min(best, 9.0 - epoch), num_bad + 1
        history.append(best)
    assert len(history) <= num_bad


@pytest.mark.parametrize("widths", [[1, 1, 1], [2, 3, 1], [(0, 1), (2, 3)]])
def test_what_epochs_hand_on_is_told_of_once(lab: Any, widths: Any) -> None:
    told = sorted(about(lab.fly(has_patience, widths)))
    assert len(told) == 2
    assert "variables of `has_patience` (test_began_anew.py:" in told[0]
    assert "moved: `best`, `num_bad`, `history` (list). If what follows depends" in told[0]
    assert "moved: `schedule` (ExponentialLR). Prepare" in told[1]


def test_nothing_is_told_of_a_trial_that_stays(lab: Any) -> None:
    assert about(lab.fly(has_patience, [2])) == []


def adds_up(trial: Any) -> None:
    model, optimizer = prepared(trial)
    seen = list[float]()
    for _ in trial.epochs(3):
        total = torch.zeros(())
        for images, labels in trial.batches("train", batch_size=10, movable=True):
            total += train_on(trial, model, optimizer, images, labels)
            moment(trial)
        seen.append(total.item())


@pytest.mark.parametrize("widths", [[1, 1], [(0, 1), (1, 2, 3)], [(0, 1), (2, 3)]])
def test_what_batches_hand_on_is_told_of(lab: Any, widths: Any) -> None:
    (told,) = about(lab.fly(adds_up, widths, within={7}))
    assert "moved within an epoch: `seen` (list), `total` (Tensor). If" in told
    assert "trial.totals" in told


def keeps_all(trial: Any) -> None:
    model, optimizer = prepared(trial)
    schedule = trial.prepare(ExponentialLR(optimizer, 0.9))
    best, is_resumed = trial.state.get("best", math.inf), bool(trial.state)
    num_devices = trial.world_size
    for _ in trial.epochs(4):
        for images, labels in trial.batches("train", batch_size=10, movable=True):
            loss = train_on(trial, model, optimizer, images, labels)
            trial.totals["loss"] += loss * trial.shard_size
            best = trial.state["best"] = min(best, loss)
            moment(trial)
        trial.state["seen"].append(trial.totals["loss"])
        schedule.step()
    assert num_devices == trial.world_size
    assert is_resumed in (True, False)


def trains_in_stages(trial: Any) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pipeline = trial.pipeline(model, optimizer, F.cross_entropy)
    first, last, weights = model[1], model[-1], list(model.parameters())
    losses = trial.state.setdefault("seen", [])
    for _ in trial.epochs(3):
        for images, labels in trial.batches("train", batch_size=10):
            losses.append(pipeline.step(images, labels).item())
    assert all([first, last, weights])


def test_a_rank_that_has_another_stage_now_tells_nothing(lab: Any) -> None:
    lab.same(trains_in_stages, [1, 3, (1, 0, 2)])
    lab.same(trains_in_stages, [2, 1, 1])


def test_what_is_kept_is_not_told_of(lab: Any) -> None:
    lab.same(keeps_all, [1, 2, 3])
    lab.same(keeps_all, [1, 2, 3], within={2, 8})
