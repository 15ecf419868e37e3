"""What the tests of trainers of other libraries share."""

from __future__ import annotations

from typing import Any

import optuna
import pytest
from optuna.trial import FrozenTrial

from optuna_fleet.preflight.checker import Checker
from tests.fleets import Leg

# Objectives have the filters too, and these libraries much to say of the machine.
QUIET = [
    pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("UserWarning", "FutureWarning")
]
ALONE, WIDE, MOVED = [Leg((0,))], [Leg((0, 1, 2))], [Leg((0, 1), 1), Leg((2,))]
OFTEN_MOVED = [Leg((0, 1, 2), 1), Leg((2,), 2), Leg((1, 0))]


def flown(fleet: Any, objective: Any, legs: list[Leg], **options: Any) -> FrozenTrial:
    """The only trial of a study, which flies by a script."""
    fleet.script = {0: legs}
    study = optuna.create_study(**options)
    study.optimize(objective, n_trials=1, executor=fleet)
    return study.trials[0]


def close_to(values: Any, rel: float = 1e-10) -> Any:
    return pytest.approx(values, rel=rel)


def frees_its_devices_when_pruned(fleet: Any, objective: Any) -> None:
    class AtOnce(optuna.pruners.BasePruner):
        def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
            return trial.last_step == 1

    trial = flown(fleet, objective, [Leg((0, 1))], pruner=AtOnce())
    assert trial.state is optuna.trial.TrialState.PRUNED
    assert list(trial.intermediate_values) == [0, 1]
    assert flown(fleet, objective, WIDE).state is optuna.trial.TrialState.COMPLETE


def are_cleared(pipeline: Any, *objectives: Any) -> None:
    """The pre-flight check lets them have any devices and moves."""
    with Checker() as checker:
        for objective in objectives:
            verdict = checker.check(objective, pipeline)
            assert verdict.may_widen, verdict
            assert verdict.may_move, verdict
