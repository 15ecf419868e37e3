"""What a sweep leaves in the study and in the summary."""

from __future__ import annotations

import functools
import time
from typing import Any

import optuna
import pytest

from optuna_fleet import FleetExecutor
from optuna_fleet.events import MoveMeasured
from optuna_fleet.executor.moves import Moves
from optuna_fleet.sampler_bridge.ledger import flights_of
from tests.fleets import Leg, small_model, small_pipeline, train


def test_flights_and_decisions_are_recorded(log: Any) -> None:
    optuna.logging.set_verbosity(optuna.logging.INFO)
    study = optuna.create_study()
    with FleetExecutor(small_pipeline(), devices=4, device_type="cpu", policy="mip") as fleet:
        # More than the 48 batches that are timed at most, so that there is something to decide on.
        study.optimize(functools.partial(train, epochs=12), n_trials=5, executor=fleet)
    assert fleet.summary is not None
    for trial in study.trials:
        assert not trial.system_attrs  # it would be a column in `study.trials_dataframe()`
        flights = flights_of(study)[trial.number]
        assert flights[-1]["ending"] == "returned"
        assert all(f["devices"] and f["start"] <= f["end"] for f in flights)
    attributes = study._storage.get_study_system_attrs(study._study_id)
    recorded = [v for k, v in attributes.items() if k.startswith("optuna_fleet:decision")]
    decisions = fleet.summary.decisions
    assert [r["reason"] for r in recorded] == [d.reason for d in decisions]
    assert decisions[0].round == 1
    assert all(d.status and d.allocator and d.solve_time_s >= 0 for d in decisions)
    lines = log.getvalue().splitlines()
    assert f"Round 1: {decisions[0].reason}" in lines  # the others only if something moves
    assert lines[-1] == str(fleet.summary)
    assert f"in {len(decisions)} rounds" in lines[-1]
    assert "sharing factor" in lines[-1]
    assert "; solver " in lines[-1]
    assert repr(fleet.summary).split("\n  ") == lines[-1].removesuffix(".").split("; ")


def test_the_summary_counts(fleet: Any) -> None:
    study = optuna.create_study()
    study.optimize(end_variously, n_trials=6, catch=ValueError, executor=fleet)
    summary = fleet.summary
    assert summary.trials == {"complete": 2, "pruned": 2, "fail": 2}
    assert summary.num_devices == 4
    assert set(summary.busy_s) <= {0, 1, 2, 3}
    assert "6 trials (2 complete, 2 fail, 2 pruned)" in str(summary)


def begin_slowly(trial: Any) -> float:
    """Like a compiled model: the first batch on other devices takes its time."""
    model = trial.prepare(small_model())
    for epoch in trial.epochs(3):
        for step, _ in enumerate(trial.batches("train", batch_size=10)):
            if step == 0 and epoch > 0:
                time.sleep(0.3)
    return float(len(list(model.parameters())))


def test_what_moves_cost_is_measured(fleet: Any) -> None:
    study = optuna.create_study()
    fleet.script = {0: [Leg((0,), 1), Leg((1, 2), 2), Leg((3,))]}
    study.optimize(begin_slowly, n_trials=1, executor=fleet)
    costs = [event.seconds for event in fleet.events if isinstance(event, MoveMeasured)]
    assert len(costs) == fleet.summary.rescales == 2
    assert all(seconds > 0.3 for seconds in costs)
    assert fleet.summary.move_s == pytest.approx(sum(costs) / 2)
    assert "moves to other devices: 2, at " in str(fleet.summary)


def test_the_time_that_a_trial_waits_for_devices_is_no_cost_of_its_move() -> None:
    now = 0.0
    moves = Moves(lambda: now)
    told = []
    for now, (act, number) in enumerate(  # noqa: B007 - which the clock reads
        [
            (moves.launched, 0),
            (moves.trains, 0),  # its first flight is no move
            (moves.leaves, 0),
            (moves.left, 0),  # a second for its checkpoint
            (moves.launched, 1),
            (moves.launched, 0),
            (moves.trains, 1),
            (moves.trains, 0),  # two until its first batch
            (moves.leaves, 0),
            (moves.stays, 0),  # it could not be checkpointed
            (moves.left, 0),  # by its trainer's death
            (moves.launched, 0),
            (moves.trains, 0),
        ]
    ):
        told.append(act(number))
    assert [seconds for seconds in told if seconds is not None] == moves.seconds == [3.0]


def end_variously(trial: Any) -> float:
    if trial.number % 3 == 0:
        raise optuna.TrialPruned
    if trial.number % 3 == 1:
        raise ValueError("no")
    return 1.0
