"""An agent that fails by an error of its own: the user reads which one it was."""

from __future__ import annotations

import contextlib
import io
import resource
from collections.abc import Iterator
from typing import Any

import optuna
import pytest
import torch

from optuna_fleet import FleetExecutor, LaunchError, Limits, SharedPipeline, TrainerLostError

pytestmark = pytest.mark.usefixtures("afresh")  # what was there before has limits of its own

_MIB = 1 << 20


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
def small_files() -> Iterator[None]:
    """A limit of this process, which those that it starts inherit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MIB, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_memory_that_an_agent_may_not_have_is_named() -> None:
    data = torch.utils.data.TensorDataset(torch.zeros(10, 2))
    pipeline = SharedPipeline(train=data, memory_bytes=2 << 30)
    with (
        FleetExecutor(pipeline, devices=1, device_type="cpu") as fleet,
        small_files(),
        pytest.raises(LaunchError) as raised,
    ):
        optimize(lambda trial: 0.0, fleet)
    told = str(raised.value)
    assert "Node local-0 can't be used: its agent failed (OSError: [Errno " in told
    assert f"{2 << 30} bytes for preprocessed data can't be had (File too large)" in told


def test_an_agent_that_fails_between_trials_tells_why(log: io.StringIO) -> None:
    with (
        FleetExecutor(devices=1, device_type="cpu", limits=Limits(max_restarts=0)) as fleet,
        small_files(),
    ):
        assert optimize(Holding(1), fleet) == 1.0
        with pytest.raises(TrainerLostError, match=r"its agent failed .OSError: .*File too large"):
            optimize(Holding(4 * _MIB), fleet)
    words = "Node local-0 was lost: its agent failed (OSError: [Errno 27] File too large); another"
    assert words in log.getvalue()
