"""After `close` no thread of an executor is left."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import optuna
import pytest
import torch

from optuna_fleet import FleetExecutor, LocalCluster, SharedPipeline

pytestmark = pytest.mark.usefixtures("afresh")


def plain(trial: optuna.Trial) -> float:
    return trial.suggest_float("x", 0, 1)


def trains(trial: Any) -> float:
    model = trial.prepare(torch.nn.Linear(2, 2))
    for _ in trial.epochs(2):
        for (batch,) in trial.batches("train", batch_size=2):
            model(batch).sum().backward()
    return 0.0


def fails(trial: optuna.Trial) -> float:
    raise RuntimeError("for once")


def ten_samples() -> SharedPipeline:
    return SharedPipeline(train=torch.utils.data.TensorDataset(torch.zeros(10, 2)))


@pytest.fixture
def _threads_end_slowly() -> Iterator[None]:
    """So that one that nobody waits for is still there."""

    def linger(frame: FrameType, event: str, arg: object) -> None:
        if event == "return" and frame.f_code is threading.Thread.run.__code__:
            time.sleep(0.3)

    threading.setprofile(linger)
    yield
    threading.setprofile(None)


@pytest.mark.usefixtures("_threads_end_slowly")
@pytest.mark.parametrize(
    ("objective", "pipeline", "cluster"),
    [
        (plain, None, "local"),
        (trains, ten_samples, LocalCluster(nodes=2)),
        (fails, None, "local"),
    ],
)
def test_no_thread_is_left(objective: Any, pipeline: Any, cluster: Any) -> None:
    before = set(threading.enumerate())
    data = pipeline() if pipeline else None
    fleet = FleetExecutor(data, devices=1, device_type="cpu", cluster=cluster)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    study.optimize(objective, n_trials=3, catch=(RuntimeError,), executor=fleet)
    assert set(threading.enumerate()) - before
    fleet.close()
    assert not set(threading.enumerate()) - before
