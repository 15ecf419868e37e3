"""A sweep whose driver kills itself before or after a given write to its storage.

``python -m tests.executor.mortal_sweep FOLDER KIND TICK SIGNAL``: TICK 0 lets it live; it then
prints how many ticks there were. The same command again goes on with what a killed one left.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from optuna_fleet import Checkpoints, FleetExecutor
from optuna_fleet.checkpoints.folder import StudyFolder
from optuna_fleet.sampler_bridge.records import CALL_PREFIX
from tests.behaviour.samplers import ByNumber

NUM_TRIALS = 5
_WRITES = (
    "create_new_trial",
    "set_trial_param",
    "set_trial_state_values",
    "set_trial_intermediate_value",
    "set_trial_user_attr",
    "set_trial_system_attr",
    "set_study_system_attr",
)
_BY_THE_CLOCK = (CALL_PREFIX,)
"""Records that there are the more of the longer a call takes: these are no ticks."""

_ticks = itertools.count(1)


def plain(trial: Any) -> float:
    value = trial.suggest_float("x", 0.0, 1.0)
    for step in range(3):
        trial.report(value + step, step)
        if trial.should_prune():
            raise optuna.TrialPruned
    trial.set_user_attr("y", trial.suggest_float("y", 0.0, 1.0))
    return value


def training(trial: Any) -> float:
    from tests.fleets import train

    value = train(trial, epochs=4)
    trial.set_user_attr("x", trial.suggest_float("x", 0.0, 1.0))
    return value


def let_die(kind: type, names: tuple[str, ...], at: int, how: int) -> None:
    """Have this process die before or after one of the calls of these methods."""
    for name in names:
        setattr(kind, name, _mortal(getattr(kind, name), at, how))


def _mortal(method: Any, at: int, how: int) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(each, str) and each.startswith(_BY_THE_CLOCK) for each in args):
            return method(*args, **kwargs)
        _tick(at, how)
        result = method(*args, **kwargs)
        _tick(at, how)
        return result

    return call


def _tick(at: int, how: int) -> None:
    if next(_ticks) == at:
        os.kill(os.getpid(), how)


def main(folder: Path, kind: str, at: int, how: int) -> None:
    storage = JournalStorage(JournalFileBackend(str(folder / "journal")))
    study = optuna.create_study(
        storage=storage,
        study_name="mortal",
        sampler=ByNumber(),
        pruner=optuna.pruners.ThresholdPruner(upper=2.9),
        load_if_exists=True,
    )
    options: dict[str, Any] = {"devices": 2, "checkpoints": folder / "checkpoints", "seed": 3}
    if kind == "plain":
        objective, fleet = plain, FleetExecutor(**options)
    else:
        from tests.fleets import fleet_of

        options["checkpoints"] = Checkpoints(folder / "checkpoints", interval_s=0.0)
        objective, fleet = training, fleet_of(**options)
    let_die(JournalStorage, _WRITES, at, how)
    let_die(StudyFolder, ("record_call", "_remove", "left"), at, how)
    with fleet:
        study.optimize(objective, n_trials=NUM_TRIALS, executor=fleet)
    print("TICKS", next(_ticks) - 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
