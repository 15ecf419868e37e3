"""Trials that count steps, and what plans know of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import optuna
import pytest
import torch

from optuna_fleet import FleetExecutor, SharedPipeline
from optuna_fleet.events import DataRequested
from optuna_fleet.trainer.data.reading import Periods
from tests.fleets import Leg, Noise, fleet_of, run, small_model

SIZE, BATCH = 41, 8  # 6 steps an epoch
EVERY = 4


def pipeline(**options: Any) -> SharedPipeline:
    return SharedPipeline(train=Noise(SIZE, augment=True), val=Noise(20), **options)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Any]:
    with fleet_of(devices=2, pipeline=pipeline()) as executor:
        yield executor


def counts(trial: Any) -> float:
    """How many batches there are, where."""
    model = small_model()
    trial.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    before = len(trial.batches("train", 8))
    for _ in trial.steps(10, every=8):
        read = [len(list(trial.batches(name))) for name in ("train", "val")]
        trial.set_user_attr(str(len(trial.user_attrs)), [len(trial.batches("train")), *read])
    for _ in trial.steps(10, every=4):
        break
    after = len(trial.batches("train"))
    trial.set_user_attr("around", [before, after])
    return 0.0


EXPECTED = {"0": [8, 8, 3], "1": [2, 2, 3], "around": [6, 6]}


def test_without_processes() -> None:
    study = optuna.create_study()
    with FleetExecutor(pipeline(), devices=1, cluster="inline") as executor:
        study.optimize(counts, n_trials=1, executor=executor)
    assert study.trials[0].user_attrs == EXPECTED


def six_steps(epoch: int, first_step: int = 0, continues: bool = False) -> list[Any]:
    return [(epoch, step, continues) for step in range(first_step, 6)]


def test_a_period_goes_on_in_the_data() -> None:
    periods = Periods(16, 4)
    goes_on = [(1, step, True) for step in (2, 3, 4, 5)]
    assert list(periods.batches(six_steps, 2, 0)) == goes_on
    assert list(periods.batches(six_steps, 2, 3)) == goes_on[3:]
    assert list(periods.batches(six_steps, 3, 0)) == [(2, s, False) for s in range(4)]


def two_loops(trial: Any) -> float:
    """Loops over as many epochs and periods, after a look at the data."""
    model = small_model()
    trial.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    for loop in ([0], trial.epochs(2), trial.steps(8, every=4)):
        for _ in loop:
            for name in ("val", "train", "val"):
                next(iter(trial.batches(name, BATCH)))
    return 0.0


def test_plans_know_how_long_each_loop_is(fleet: Any) -> None:
    run(fleet, two_loops, Leg((0,)))
    models = [event.model for event in fleet.events if isinstance(event, DataRequested)]
    told = [(model.samples_per_epoch, model.max_epochs) for model in models]
    assert told == [(20, None), (SIZE, None), (SIZE, 2), (EVERY * BATCH, 2)]
