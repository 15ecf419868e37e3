"""An agent that fails by an error of its own: the user reads which one it was."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest

from optuna_fleet import FleetExecutor, Limits, TrainerLostError

ROOT = Path(__file__).parents[2]

_MIB = 1 << 20

SCRIPT = """
import resource, sys
from pathlib import Path
import optuna, torch
from optuna_fleet import FleetExecutor, LaunchError, SharedPipeline

def read(trial):
    return float(sum(len(batch) for (batch,) in trial.batches("train", batch_size=2)))

if __name__ == "__main__":
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = {"FSIZE": 1 << 20, "AS": mapped + (1 << 30)}[sys.argv[1]]
    which = getattr(resource, "RLIMIT_" + sys.argv[1])
    resource.setrlimit(which, (limit, resource.getrlimit(which)[1]))
    data = torch.utils.data.TensorDataset(torch.zeros(10, 2))
    pipeline = SharedPipeline(train=data, memory_bytes=2 << 30)
    try:
        with FleetExecutor(pipeline, devices=1, device_type="cpu") as fleet:
            optuna.create_study().optimize(read, n_trials=1, executor=fleet)
    except LaunchError as error:
        print(error)
"""


class Holding:
    """An objective that brings so many bytes along."""

    def __init__(self, num_bytes: int) -> None:
        self.numbers = bytes(num_bytes)

    def __call__(self, trial: optuna.Trial) -> float:
        return float(len(self.numbers))


def optimize(objective: Any, fleet: FleetExecutor) -> float:
    study = optuna.create_study()
    study.optimize(objective, n_trials=1, executor=fleet)
    return study.best_value


@contextlib.contextmanager
def limited(which: int, limit: int) -> Iterator[None]:
    """A limit of this process, which those that it starts inherit."""
    soft, hard = resource.getrlimit(which)
    resource.setrlimit(which, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(which, (soft, hard))


@pytest.mark.parametrize(("limit", "words"), [("FSIZE", "File too large")])
def test_memory_that_an_agent_may_not_have_is_named(limit: str, words: str) -> None:
    """Its limits are those of the script."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, limit],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Node local-0 can't be used: its agent failed (OSError: [Errno " in done.stdout
    assert f"{2 << 30} bytes for preprocessed data can't be had ({words})" in done.stdout


@pytest.mark.usefixtures("afresh")  # what was there before has limits of its own
def test_an_agent_that_fails_between_trials_tells_why(log: io.StringIO) -> None:
    with (
        FleetExecutor(devices=1, device_type="cpu", limits=Limits(max_restarts=0)) as fleet,
        limited(resource.RLIMIT_FSIZE, _MIB),
    ):
        assert optimize(Holding(1), fleet) == 1.0
        with pytest.raises(TrainerLostError, match=r"its agent failed .OSError: .*File too large"):
            optimize(Holding(4 * _MIB), fleet)
    words = "Node local-0 was lost: its agent failed (OSError: [Errno 27] File too large); another"
    assert words in log.getvalue()
