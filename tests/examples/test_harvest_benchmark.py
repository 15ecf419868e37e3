"""`benchmarks/harvest.py` lives through a tiny trace; what it measures is not judged here."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optuna_fleet.replay.trace import load_trace
from tests.nursery import Nursery

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
JOBS = {
    "scaling": {"net": {"nodes": [0, 1, 8], "images_per_s": [0, 10, 70]}},
    "hpo_shufflenet": {
        "dnn": "net",
        "n_jobs": 1,
        "Jmin": 1,
        "Jmax": 8,
        "Tcup_s": 1,
        "Tcdw_s": 1,
        "Pmax_images": 1000,
        "spacing_s": 0,
    },
}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Of three nodes one never changes; one is taken and comes back, one comes and is taken."""
    np.savez(
        path := tmp_path / "trace.npz",
        time_s=np.array([0.0, 30.0, 60.0, 90.0, 150.0]),
        initial_idle=np.array([1, 1, 0]),
        change_event=np.array([1, 2, 3, 3]),
        change_node=np.array([2, 0, 0, 2]),
        change_delta=np.array([1, -1, 1, -1]),
        node_name=np.array(["a", "b", "c"]),
    )
    return path


@pytest.fixture
def harvest(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("harvest")


@pytest.fixture
def piece(harvest: Any, trace: Path) -> Any:
    whole = load_trace(trace)
    return harvest.piece_of(whole, begin_s=40.0, length_s=100.0, num_nodes=2, compression=10.0)


def test_a_piece_has_the_nodes_that_change_most_in_compressed_time(
    harvest: Any, piece: Any
) -> None:
    assert piece.names == ("a", "c")
    changes = [(change.time_s, change.joined, change.left) for change in piece.changes]
    assert changes == [(0, (0, 1), ()), (2, (), (0,)), (5, (0,), (1,)), (10, (), ())]


def test_it_lives_through_a_trace_and_replays_it(
    trace: Path, tmp_path: Path, nursery: Nursery
) -> None:
    jobs = tmp_path / "jobs.json"
    jobs.write_text(json.dumps(JOBS))
    given = "--begin 0 --hours 0.04 --nodes 3 --compression 30 --job-minutes 1 --policies elastic"
    done = nursery.run(BENCHMARKS / "harvest.py", str(trace), str(jobs), *given.split())
    assert done.returncode == 0, done.stderr
    assert "3 nodes" in done.stdout
    row = done.stdout.splitlines()[-1]
    assert row.startswith("| `elastic` | ")
    assert len(row.split("|")) == 11
