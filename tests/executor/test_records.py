"""What a sweep leaves in the study and in the summary."""

from __future__ import annotations

import functools
import time
from typing import Any

import optuna
import pytest

from optuna_fleet import FleetExecutor
from optuna_fleet.events import (
    MoveMeasured,
)
from optuna_fleet.sampler_bridge.records import calls_of, device_spans_of, flights_of
from tests.fleets import Leg, small_model, small_pipeline, train


def test_flights_are_recorded_and_decisions_told(log: Any) -> None:
    optuna.logging.set_verbosity(optuna.logging.INFO)
    study = optuna.create_study()
    with FleetExecutor(small_pipeline(), devices=4, device_type="cpu", policy="mip") as fleet:
        # More than the 48 batches that are timed at most, so that there is something to decide on.
        study.optimize(functools.partial(train, epochs=30), n_trials=5, executor=fleet)
    assert fleet.summary is not None
    assert [call.ending for call in calls_of(study)] == ["done"]
    for trial in study.trials:
        assert not trial.system_attrs  # it would be a column in `study.trials_dataframe()`
        flights = flights_of(study)[trial.number]
        assert flights[-1]["ending"] == "returned"
        assert all(f["devices"] and f["start"] <= f["end"] for f in flights)
    decisions = fleet.summary.decisions
    assert decisions[0].round == 1
    assert all(d.status and d.allocator and d.solve_time_s >= 0 for d in decisions)
    lines = log.getvalue().splitlines()
    assert f"Round 1: {decisions[0].reason}" in lines  # the others only if something moves
    assert lines[-1] == str(fleet.summary)
    assert "sharing factor" in lines[-1]
    assert f"; {len(decisions)} plan" in lines[-1]
    assert repr(fleet.summary).split("\n  ") == lines[-1].removesuffix(".").split("; ")


def test_the_study_knows_which_devices_were_there(fleet: Any) -> None:
    study = optuna.create_study()
    study.optimize(end_variously, n_trials=6, catch=ValueError, executor=fleet)
    spans = device_spans_of(study)
    assert sorted(span.device for span in spans) == [0, 1, 2, 3]
    assert {span.kind for span in spans} == {"cpu"}
    assert len({span.node for span in spans}) == fleet.summary.num_nodes == 1
    (began,) = {span.start for span in spans}
    for flights in flights_of(study).values():
        assert all(began <= flight["start"] for flight in flights)
    ends = [span.end for span in spans]
    assert None not in ends
    assert "on 4 devices" in str(fleet.summary)


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


def end_variously(trial: Any) -> float:
    if trial.number % 3 == 0:
        raise optuna.TrialPruned
    if trial.number % 3 == 1:
        raise ValueError("no")
    return 1.0
