"""What the study is told of a call while it runs: by a made-up one, then by a real fleet."""

from __future__ import annotations

import functools
import threading
import time
from pathlib import Path
from typing import Any

import optuna
import pytest

from optuna_fleet.sampler_bridge.records import calls_of
from optuna_fleet.visualization.top import Snapshot, open_study
from tests.fleets import evaluate, num_wrong, small_model, train_epoch

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


def test_a_sweep_can_be_watched_while_it_runs(fleet: Any, tmp_path: Path) -> None:
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
        raise ValueError("no more")

    watcher = threading.Thread(target=watch)
    watcher.start()
    objective = functools.partial(train_until, seen=seen)
    try:
        with pytest.raises(ValueError, match="no more"):
            study.optimize(objective, n_trials=1, executor=fleet, callbacks=[look])
    finally:
        seen.touch()
        watcher.join()
    assert all(snapshot.is_alive for snapshot in watched if snapshot.call)
    (run,) = watched[-1].runs
    assert len(watched[-1].devices) == 4
    assert (run.trial, run.max_epochs) == (0, 10_000)
    (call,) = calls_of(study)
    assert (call.n_trials, call.num_asked, call.runs) == (1, 1, ())
    assert call.ending == "failed"
    snapshot = Snapshot(study, call.noted)
    (ended,) = snapshot.recent
    assert snapshot.widths(ended.number)[0] == 1  # it begins on one device


def _trains(snapshot: Snapshot) -> bool:
    return any(run.epochs_done and run.samples_per_s for run in snapshot.runs)
