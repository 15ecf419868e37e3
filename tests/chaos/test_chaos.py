"""No trial is lost: sweeps that are struck while they run end with the records of one that is not.

Each kind of fault strikes once; `benchmarks/chaos.py` strikes more often, at other moments.
"""

from __future__ import annotations

import copy
import dataclasses

import pytest
from optuna.trial import FrozenTrial, TrialState

from tests.chaos.harness import Result, differences, drawn, playable, run, storage_for
from tests.nursery import Nursery

NUM_TRIALS = 8

SWEEPS: dict[str, list[str]] = {
    "deaths, hangs and damaged checkpoints": [
        "kill a trainer in an epoch",
        "kill a trainer as it writes a checkpoint",
        "kill one rank of two",
        "kill a preprocessor",
        "kill the solver at work",
        "kill the agent",
        "kill a trainer at any time",
        "kill any process at any time",
        "kill the driver as it begins",
        "kill the driver at a trial's end",
        "stop a preprocessor",
        "stop the agent",
        "clock of a trainer jumps ahead",
        "clock of the driver jumps back",
        "storage locked",
        "checkpoint with a flipped bit",
        "both checkpoints damaged",
        "checkpoints gone",
        "a second driver comes",
    ],
    "failures and disks": [
        "exception on one rank",
        "address space used up",
        "disk full",
        "checkpoints read-only",
        "/dev/shm full",
    ],
}
"""The benchmark plays all kinds."""


@pytest.fixture(scope="module")
def undisturbed(nursery: Nursery) -> Result:
    result = run(num_trials=NUM_TRIALS, faults=[], nursery=nursery)
    assert result.problems == [], result.log
    return result


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


def test_a_record_that_differs_is_found(undisturbed: Result) -> None:
    def drop_a_step(trials: list[FrozenTrial]) -> None:
        trials[0].intermediate_values.pop(1)

    def change_a_value(trials: list[FrozenTrial]) -> None:
        trials[0].intermediate_values[1] *= 1 + 1e-9

    for damage in (list.pop, drop_a_step, change_a_value):
        trials = copy.deepcopy(undisturbed.trials)
        assert differences(dataclasses.replace(undisturbed, trials=trials), undisturbed) == {}
        damage(trials)
        assert differences(dataclasses.replace(undisturbed, trials=trials), undisturbed) != {}
