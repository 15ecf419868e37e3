"""`benchmarks/harvest.py` lives through a tiny trace; what it measures is not judged here."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.nursery import Nursery

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


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


def test_it_lives_through_a_trace_and_replays_it(trace: Path, nursery: Nursery) -> None:
    given = "--begin 0 --hours 0.04 --nodes 3 --compression 30 --job-minutes 1 --policies elastic"
    done = nursery.run(BENCHMARKS / "harvest.py", str(trace), *given.split())
    assert done.returncode == 0, done.stderr
    assert "3 nodes" in done.stdout
    row = done.stdout.splitlines()[-1]
    assert row.startswith("| `elastic` | ")
    assert len(row.split("|")) == 11
