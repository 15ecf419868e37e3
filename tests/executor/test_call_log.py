"""What the study is told of a call while it runs: by a made-up one, then by a real fleet."""

from __future__ import annotations

import functools
import threading
import time
from pathlib import Path
from typing import Any

import optuna
import pytest

from optuna_fleet.events import DataRequested, EpochEnded, Launch, Model, RateMeasured
from optuna_fleet.executor.call.call_progress import Progress
from optuna_fleet.executor.call.ranks import RunCalls
from optuna_fleet.executor.call.runs import RunRecord
from optuna_fleet.sampler_bridge.records import CallState, calls_of
from optuna_fleet.visualization.snapshot import Condition, Snapshot
from optuna_fleet.visualization.top import open_study
from tests.fleets import evaluate, num_wrong, small_model, train_epoch


class Clocked:
    """A log whose clock stands still until it is set, and what it has recorded."""

    def __init__(self, cost_s: float = 0.0) -> None:
        self.now, self.cost_s = 100.0, cost_s
        self.states: list[CallState] = []
        state = CallState(began=1.0, noted=1.0, every_s=0.0)
        self.log = Progress(self._record, state, clock=lambda: self.now)

    def launched(self, number: int, *devices: int) -> None:
        calls = RunCalls(world_size=len(devices))
        self.run = RunRecord(launch=launch(number, *devices), start=self.now, calls=calls)
        self._take(self.run.launch)

    def defined(self, samples: int, epochs: int | None) -> None:
        self._take(DataRequested(run_id=0, model=model(samples, epochs)))

    def measured(self, samples_per_s: float) -> None:
        self._take(RateMeasured(run_id=0, samples_per_s=samples_per_s))

    def epoch_ended(self, epochs_done: int) -> None:
        self._take(EpochEnded(run_id=0, epochs_done=epochs_done, converged=False))

    def _take(self, event: Any) -> None:
        self.log.take(event, self.run, self.now)

    def _record(self, state: CallState) -> None:
        self.states.append(state)
        self.now += self.cost_s

    def note(self, *flying: int, asked: tuple[int, ...] = (), after_s: float = 0.0) -> CallState:
        self.now += after_s
        if self.log.left_s <= 0.0:
            self.log.note(flying, {*flying, *asked}, len(flying) + len(asked))
        return self.states[-1]


def launch(number: int, *devices: int) -> Launch:
    return Launch(
        run_id=number, number=number, devices=devices, probe=False, measure=False, round=1
    )


def model(samples: int, epochs: int | None) -> Model:
    return Model(
        structure="a",
        resumable=True,
        max_devices=4,
        samples_per_epoch=samples,
        max_epochs=epochs,
    )


def test_it_knows_how_fast_a_trial_is() -> None:
    clocked = Clocked()
    clocked.launched(0, 0)
    clocked.defined(1000, 7)
    assert clocked.note(0).runs[0].samples_per_s is None
    clocked.measured(400.0)
    assert clocked.note(0, after_s=5).runs[0].samples_per_s == 400.0
    clocked.epoch_ended(1)
    run = clocked.note(0, after_s=5).runs[0]
    assert (run.samples_per_s, run.epochs_done, run.max_epochs) == (200.0, 1, 7)
    clocked.epoch_ended(2)  # in 5 seconds, as the first
    assert clocked.note(0, after_s=5).runs[0].samples_per_s == 200.0


def test_signs_of_life_become_rarer_but_a_launch_is_told_of_soon() -> None:
    clocked = Clocked()
    clocked.note()
    assert clocked.log.left_s == 102.0 - clocked.now
    clocked.note(after_s=1.0)
    assert len(clocked.states) == 1
    assert clocked.note(after_s=900.0).every_s == pytest.approx(9.01)
    assert clocked.note(after_s=1e5).every_s == 15.0
    assert clocked.log.left_s == 15
    clocked.launched(0, 0)
    assert clocked.log.left_s == 2


# -- a fleet --------------------------------------------------------------------------------------


def train_until(trial: Any, *, seen: Path) -> float:
    """Epochs, until somebody has seen it."""
    model = trial.prepare(small_model())
    for epoch in trial.epochs(10_000):
        train_epoch(trial, model, _NoOptimizer(), [], batch_size=10)
        trial.report(evaluate(trial, model, num_wrong) / 20, epoch)
        if trial.sum(float(seen.exists())):
            break
    return 1.0


class _NoOptimizer:
    def zero_grad(self) -> None: ...

    def step(self) -> None: ...


@pytest.mark.parametrize("fails", [False, True])
def test_a_sweep_can_be_watched_while_it_runs(fleet: Any, tmp_path: Path, fails: bool) -> None:
    url, seen = f"sqlite:///{tmp_path}/study.db", tmp_path / "seen"
    study = optuna.create_study(study_name="watched", storage=url)
    watched: list[Snapshot] = []

    def watch() -> None:
        try:
            own = open_study("watched", url)
            while not watched or not _trains(watched[-1]):
                watched.append(Snapshot(own, time.time()))
        finally:
            seen.touch()

    def look(study: Any, trial: Any) -> None:
        if fails:
            raise ValueError("no more")

    watcher = threading.Thread(target=watch)
    watcher.start()
    objective = functools.partial(train_until, seen=seen)
    try:
        study.optimize(objective, n_trials=1, executor=fleet, callbacks=[look])
    except ValueError:
        assert fails
    finally:
        seen.touch()
        watcher.join()
    assert {snapshot.condition for snapshot in watched} <= {
        Condition.EMPTY,
        Condition.NOT_A_FLEETS,
        Condition.RUNNING,
    }
    (run,) = watched[-1].runs
    assert len(watched[-1].devices) == 4
    assert (run.state.trial, run.state.max_epochs) == (0, 10_000)
    (call,) = calls_of(study)
    assert (call.n_trials, call.num_asked, call.runs) == (1, 1, ())
    assert call.ending == ("failed" if fails else "done")
    snapshot = Snapshot(study, call.noted)
    (ended,) = snapshot.recent
    assert snapshot.widths(ended.number)[0] == 1  # it begins on one device


def _trains(snapshot: Snapshot) -> bool:
    return any(run.state.epochs_done and run.state.samples_per_s for run in snapshot.runs)
