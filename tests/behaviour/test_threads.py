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


def trains(trial: Any) -> float:
    model = trial.prepare(torch.nn.Linear(2, 2))
    for _ in trial.epochs(2):
        for (batch,) in trial.batches("train", batch_size=2):
            model(batch).sum().backward()
    return 0.0


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
def test_no_thread_is_left() -> None:
    before = set(threading.enumerate())
    data = SharedPipeline(train=torch.utils.data.TensorDataset(torch.zeros(10, 2)))
    fleet = FleetExecutor(data, devices=1, device_type="cpu", cluster=LocalCluster(nodes=2))
    optuna.create_study().optimize(trains, n_trials=3, executor=fleet)
    assert set(threading.enumerate()) - before
    fleet.close()
    assert not set(threading.enumerate()) - before
