"""No trial is lost: sweeps that are struck while they run end with the records of one that is not.

Each kind of fault strikes once; `benchmarks/chaos.py` strikes more often, at other moments.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import pytest
from optuna.trial import FrozenTrial, TrialState

from tests.chaos.faults import KINDS
from tests.chaos.harness import Result, differences, drawn, playable, run, storage_for
from tests.nursery import Nursery

NUM_TRIALS = 8

SWEEPS: dict[str, list[str]] = {
    "deaths": [
        "kill a trainer in an epoch",
        "kill a trainer after a report",
        "kill a trainer as it writes a checkpoint",
        "kill one rank of two",
        "kill some other trainer",
        "kill a preprocessor",
        "kill the solver at work",
        "kill the agent",
        "kill a trainer at any time",
        "kill a preprocessor at any time",
        "kill any process at any time",
        "kill the agent at any time",
        "kill the driver at any time",
        "kill the driver as it begins",
    ],
    "failures and disks": [
        "exception",
        "exception on one rank",
        "MemoryError",
        "torch.OutOfMemoryError",
        "address space used up",
        "disk full",
        "checkpoints read-only",
        "/dev/shm full",
    ],
    "hangs and clocks": [
        "stop a trainer",
        "stop one rank of two",
        "stop a preprocessor",
        "stop the agent",
        "stop the solver at work",
        "clock of a trainer jumps ahead",
        "clock of a trainer jumps back",
        "clock of the driver jumps ahead",
        "clock of the driver jumps back",
    ],
    "drivers, storages and checkpoints": [
        "kill the driver",
        "kill the driver at a trial's end",
        "storage locked",
        "checkpoint truncated",
        "checkpoint torn",
        "checkpoint with a flipped bit",
        "both checkpoints damaged",
        "checkpoints gone",
        "a second driver comes",
    ],
    "an outage": ["storage gone"],
}
# The benchmark plays all.
ELSEWHERE = ["storage gone for a minute", "storage locked for a minute"]


@pytest.fixture(scope="module")
def undisturbed(nursery: Nursery) -> Result:
    result = run(num_trials=NUM_TRIALS, faults=[], nursery=nursery)
    assert result.problems == [], result.log
    return result


def test_every_kind_strikes_somewhere() -> None:
    assert sorted(kind for kinds in SWEEPS.values() for kind in kinds) == sorted(
        KINDS.keys() - ELSEWHERE
    )


def test_the_undisturbed_sweep_has_all_kinds_of_ends(undisturbed: Result) -> None:
    states = [trial.state for trial in undisturbed.trials]
    assert states.count(TrialState.COMPLETE) >= 3
    assert states.count(TrialState.PRUNED) >= 3
    assert len(states) == NUM_TRIALS
    assert min(undisturbed.widths.values()) == 1 < max(undisturbed.widths.values())


@pytest.mark.timeout(1200)  # the harness has its own
@pytest.mark.parametrize("name", SWEEPS)
def test_a_struck_sweep_ends_with_the_records_of_the_undisturbed_one(
    nursery: Nursery, undisturbed: Result, name: str
) -> None:
    kinds = [kind for kind in SWEEPS[name] if kind in playable()]
    if not kinds:
        pytest.skip("no PostgreSQL server here")
    result = run(
        num_trials=NUM_TRIALS,
        faults=drawn(kinds, undisturbed, seed=1),
        seed=1,
        storage=storage_for(kinds),
        nursery=nursery,
    )
    assert result.problems == [], result.log
    # Where the machine is fast, the sweep may be over when a late one strikes.
    assert [fault for fault in result.unreached if not fault.after_s] == [], result.log
    assert result.strikes, result.log
    assert differences(result, undisturbed) == {}, result.log
    if name == "an outage":
        assert result.log.count("The study's storage is gone") == 1
        assert result.log.count("The study's storage is back") == 1


DAMAGES: dict[str, Callable[[list[FrozenTrial]], object]] = {
    "without its last trial": lambda trials: trials.pop(),
    "still running": lambda trials: setattr(trials[0], "state", TrialState.RUNNING),
    "another value": lambda trials: trials[0].intermediate_values.update(
        {1: trials[0].intermediate_values[1] * (1 + 1e-9)}
    ),
    "without a step": lambda trials: trials[0].intermediate_values.pop(1),
    "other parameters": lambda trials: setattr(trials[0], "params", {"lr": 0.5}),
    "other losses": lambda trials: trials[0].user_attrs["losses"].append(0.5),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_record_that_differs_is_found(undisturbed: Result, damage: str) -> None:
    trials = copy.deepcopy(undisturbed.trials)
    assert differences(dataclasses.replace(undisturbed, trials=trials), undisturbed) == {}
    DAMAGES[damage](trials)
    assert differences(dataclasses.replace(undisturbed, trials=trials), undisturbed) != {}
