"""Recorded data: run with OPTUNA_FLEET_DATA=FOLDER, which holds BFTrainer's trace and workload."""

import os
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from replay_cases import check_spans, comparable

from optuna_fleet.policies import Elastic
from optuna_fleet.replay.jobs import load_jobs
from optuna_fleet.replay.scenarios import TraceScenario, trace_report
from optuna_fleet.replay.trace import load_trace

FOLDER = Path(os.environ.get("OPTUNA_FLEET_DATA", "no folder"))
DAY_S = 24 * 3600.0

pytestmark = pytest.mark.skipif(
    not (FOLDER / "summit_idle_week1.npz").exists(), reason="needs OPTUNA_FLEET_DATA"
)


@cache
def first_day():
    """The trace up to the last event of its first day."""
    week = load_trace(FOLDER / "summit_idle_week1.npz")
    num_events = int((week.time_s <= DAY_S).sum())
    within = week.event < num_events
    changes = {name: getattr(week, name)[within] for name in ("event", "node", "delta")}
    return replace(week, time_s=week.time_s[:num_events], **changes)


def day_run(**options):
    trials = load_jobs(FOLDER / "bftrainer_jobs.json", "hpo")
    policy = Elastic(objective="throughput")
    return TraceScenario(trace=first_day(), trials=trials, policy=policy, **options)


def test_the_mean_number_of_idle_nodes_of_the_first_day():
    week = load_trace(FOLDER / "summit_idle_week1.npz")
    assert week.mean_nodes(DAY_S) == pytest.approx(34.8, abs=0.05)
    assert first_day().mean_nodes(DAY_S) == pytest.approx(week.mean_nodes(DAY_S))


def test_the_utilisation_of_the_first_day_is_what_it_was_and_always_the_same():
    run = day_run(events="nodes-only")
    outcome = run.run()
    assert trace_report(run, outcome)["utilisation"] == pytest.approx(0.919, abs=0.005)
    assert comparable(outcome) == comparable(run.run())
    check_spans(outcome, list(run.trace.changes()))


def test_deciding_as_trials_end_is_no_worse_than_deciding_as_nodes_change():
    shares = []
    for events in ("nodes-only", "completions"):
        run = day_run(events=events)
        shares.append(trace_report(run, run.run())["utilisation"])
    assert shares[1] >= shares[0]
