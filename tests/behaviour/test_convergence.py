"""When a trial has converged."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.trial import TrialState

from optuna_fleet import Convergence
from tests.behaviour.harness import fleet_of, small_model, train_epoch


@pytest.mark.parametrize(
    ("values", "reached"),
    [
        ([], False),
        ([0.5], False),
        ([0.5, 0.6, 0.7], False),
        ([0.7, 0.6], False),
        ([0.7, 0.6, 0.65], True),
        ([0.7, 0.705, 0.709], True),  # not better by more than 0.01
        ([0.7, 0.6, 0.72], False),
        ([float("nan"), float("nan")], True),
        ([float("nan"), 0.5, 0.6], False),
    ],
)
def test_patience_and_minimum_improvement(values: list[float], reached: bool) -> None:
    convergence = Convergence(patience=2, min_improvement=0.01)
    assert convergence.is_reached(values, maximize=True) is reached
    mirrored = [-value for value in values]
    assert convergence.is_reached(mirrored, maximize=False) is reached


def improves_for_a_while(trial: Any) -> float:
    """Its loss falls for three epochs, if `kind` says so, and then stays."""
    last = 3 if trial.suggest_categorical("kind", ["falls", "stays"]) == "falls" else 0
    model = small_model()
    model, optimizer = trial.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    value = 1.0
    for epoch in trial.epochs(20):
        train_epoch(trial, model, optimizer, [], batch_size=41)
        value = 1.0 - 0.1 * min(epoch, last)
        trial.report(value, epoch)
    return value


@pytest.fixture(scope="module")
def fleet() -> Iterator[Any]:
    convergence = Convergence(patience=2, min_improvement=0.01)
    with fleet_of(devices=2, convergence=convergence) as executor:
        yield executor


def test_a_trial_that_has_converged_leaves_its_loop_and_is_complete(fleet: Any) -> None:
    study = optuna.create_study()
    study.enqueue_trial({"kind": "falls"})
    study.enqueue_trial({"kind": "stays"})
    study.optimize(improves_for_a_while, n_trials=2, executor=fleet)
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 2
    assert [trial.last_step for trial in study.trials] == [5, 2]
    assert [trial.value for trial in study.trials] == [pytest.approx(0.7), 1.0]


def dies_when_it_has_converged(trial: Any, once: Path) -> float:
    value = improves_for_a_while(trial)
    if not once.exists():
        once.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return value


def test_a_trial_that_is_run_again_converges_where_it_had(fleet: Any, tmp_path: Path) -> None:
    study = optuna.create_study()
    study.enqueue_trial({"kind": "falls"})
    objective = functools.partial(dies_when_it_has_converged, once=tmp_path / "died")
    study.optimize(objective, n_trials=1, executor=fleet)
    assert (tmp_path / "died").exists()
    (trial,) = study.trials
    assert (trial.last_step, trial.value) == (5, pytest.approx(0.7))
