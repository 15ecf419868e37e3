"""Pruners judge each report once, in the driver, as in Optuna's own loop; trials converge."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.pruners import (
    BasePruner,
    HyperbandPruner,
    MedianPruner,
    PatientPruner,
    PercentilePruner,
    SuccessiveHalvingPruner,
    ThresholdPruner,
    WilcoxonPruner,
)
from optuna.trial import FrozenTrial, TrialState

from optuna_fleet import Convergence, FleetExecutor
from tests.behaviour.harness import Leg, fleet_of, small_model, train_epoch
from tests.behaviour.samplers import ByNumber

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")

STEPS = 9
PRUNERS: dict[str, Callable[[], BasePruner]] = {
    "hyperband": lambda: HyperbandPruner(min_resource=1, max_resource=STEPS),
    "halving": lambda: SuccessiveHalvingPruner(min_resource=1, reduction_factor=2),
    "median": lambda: MedianPruner(n_startup_trials=3, n_warmup_steps=1),
    "percentile": lambda: PercentilePruner(30.0, n_startup_trials=3, interval_steps=2),
    "wilcoxon": lambda: WilcoxonPruner(p_threshold=0.3, n_startup_steps=1),
    "patient": lambda: PatientPruner(None, patience=1, min_delta=0.6),
    "threshold": lambda: ThresholdPruner(upper=3.0, interval_steps=3),
}


def learn(trial: Any) -> float:
    """A curve that falls, more or less, to a floor."""
    floor, noise = trial.suggest_float("floor", 0, 4), trial.suggest_float("noise", 0, 1)
    value = 0.0
    for step in range(STEPS):
        value = floor + 1 / (1 + step) + noise * (step % 3)
        trial.report(value, step)
        if trial.should_prune():
            raise optuna.TrialPruned(f"at {step}")
    return float(value)


def new_study(name: str) -> optuna.Study:
    return optuna.create_study(
        study_name="curves",  # Hyperband's brackets depend on it
        sampler=ByNumber(),
        pruner=PRUNERS[name](),
    )


def verdicts(study: optuna.Study) -> list[tuple[Any, ...]]:
    return [(t.number, t.state, t.value, t.params, t.intermediate_values) for t in study.trials]


@pytest.mark.parametrize("name", PRUNERS)
def test_the_same_verdicts_as_in_optunas_loop(name: str, narrow: FleetExecutor) -> None:
    study, alone = new_study(name), new_study(name)
    narrow.optimize(study, learn, 20)
    alone.optimize(learn, 20)
    assert verdicts(study) == verdicts(alone)
    assert {t.state for t in study.trials} == {TrialState.COMPLETE, TrialState.PRUNED}


class Counting(BasePruner):
    """Prunes from step 2 on, and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int | None]] = []

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        self.asked.append((trial.number, trial.last_step))
        return trial.last_step == 2


def vote(trial: Any) -> float:
    votes = []
    for step in range(4):
        trial.report(1.0, step)
        verdict = trial.should_prune()
        votes.append(trial.sum(int(verdict)))
        trial.set_user_attr("votes", votes)
        if verdict:
            raise optuna.TrialPruned
    return 0.0


def test_two_ranks_get_one_verdict(fleet: Any) -> None:
    pruner = Counting()
    study = optuna.create_study(pruner=pruner)
    fleet.script = {0: [Leg((0, 1))]}
    study.optimize(vote, n_trials=1, executor=fleet)
    (trial,) = study.trials
    assert pruner.asked == [(0, 0), (0, 1), (0, 2)]
    assert trial.state is TrialState.PRUNED
    assert trial.user_attrs["votes"] == [0, 0, 2]
    assert trial.intermediate_values == {0: 1.0, 1: 1.0, 2: 1.0}  # once each


class Twice(BasePruner):
    """Would prune at two steps; says so once at the second, as successive halving does."""

    def __init__(self) -> None:
        self._second = iter([True])

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        return trial.last_step == 1 or (trial.last_step == 3 and next(self._second, False))


def is_pruned_when_told_twice(trial: Any, once: Path) -> float:
    """Asks before and after each report; dies when it is to be pruned."""
    model = small_model()
    model, optimizer = trial.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    verdicts = trial.state.setdefault("verdicts", [])
    for epoch in trial.epochs(6):
        verdicts.append(trial.should_prune())
        train_epoch(trial, model, optimizer, [], batch_size=41)
        trial.report(1.0, epoch)
        verdicts.append(trial.should_prune())
        if sum(verdicts[1::2]) == 2:
            if not once.exists():
                once.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            trial.set_user_attr("verdicts", verdicts)
            raise optuna.TrialPruned
    return 0.0


@pytest.mark.parametrize(
    "legs", [[Leg((0,)), Leg((1,))], [Leg((0,), 2), Leg((1,)), Leg((2,))]], ids=["anew", "moved"]
)
def test_a_trial_that_is_run_again_gets_the_same_verdicts(
    fleet: Any, legs: Sequence[Leg], tmp_path: Path
) -> None:
    fleet.script = {0: legs}
    study = optuna.create_study(pruner=Twice())
    objective = functools.partial(is_pruned_when_told_twice, once=tmp_path / "died")
    study.optimize(objective, n_trials=1, executor=fleet)
    assert (tmp_path / "died").exists()
    (trial,) = study.trials
    assert trial.state is TrialState.PRUNED
    assert list(trial.intermediate_values) == [0, 1, 2, 3]
    # Before each report it is what was said of the one before.
    assert trial.user_attrs["verdicts"] == [False, False, False, True, True, False, False, True]


# -- convergence ----------------------------------------------------------------------------------


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
def converging() -> Iterator[Any]:
    convergence = Convergence(patience=2, min_improvement=0.01)
    with fleet_of(devices=2, convergence=convergence) as executor:
        yield executor


def test_a_trial_that_has_converged_leaves_its_loop_and_is_complete(converging: Any) -> None:
    study = optuna.create_study()
    study.enqueue_trial({"kind": "falls"})
    study.enqueue_trial({"kind": "stays"})
    study.optimize(improves_for_a_while, n_trials=2, executor=converging)
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 2
    assert [trial.last_step for trial in study.trials] == [5, 2]
    assert [trial.value for trial in study.trials] == [pytest.approx(0.7), 1.0]


def dies_when_it_has_converged(trial: Any, once: Path) -> float:
    value = improves_for_a_while(trial)
    if not once.exists():
        once.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return value


def test_a_trial_that_is_run_again_converges_where_it_had(converging: Any, tmp_path: Path) -> None:
    study = optuna.create_study()
    study.enqueue_trial({"kind": "falls"})
    objective = functools.partial(dies_when_it_has_converged, once=tmp_path / "died")
    study.optimize(objective, n_trials=1, executor=converging)
    assert (tmp_path / "died").exists()
    (trial,) = study.trials
    assert (trial.last_step, trial.value) == (5, pytest.approx(0.7))
