"""On real GPUs: the same small trials over CUDA and NCCL."""

from __future__ import annotations

from typing import Any

import optuna
import pytest
import torch

from optuna_fleet.pipeline.reader.batches import Batch
from optuna_fleet.trainer.feed import CudaStage, ahead
from tests.fleets import Leg, fleet_of, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def losses_on(fleet: Any, devices: tuple[int, ...]) -> list[float]:
    study = optuna.create_study()
    fleet.script = {0: [Leg(devices)]}
    study.optimize(train, n_trials=1, executor=fleet)
    losses: list[float] = study.trials[0].user_attrs["losses"]
    return losses


def test_a_trial_trains_on_a_gpu_as_on_the_cpu() -> None:
    with (
        fleet_of(devices=1, device_type="cuda") as gpus,
        fleet_of(devices=1, device_type="cpu") as cpus,
    ):
        assert losses_on(gpus, (0,)) == pytest.approx(losses_on(cpus, (0,)), rel=1e-6)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_give_the_losses_of_one() -> None:
    with fleet_of(devices=2, device_type="cuda") as gpus:
        assert losses_on(gpus, (0, 1)) == pytest.approx(losses_on(gpus, (0,)), rel=1e-10)


def test_batches_arrive_pinned_ahead_and_finished():
    batches = (
        Batch(data={"x": torch.full((1 << 16,), n)}, local_size=1, global_size=1)
        for n in range(20)
    )
    stage = CudaStage(torch.device("cuda", 0), lambda data: data["x"] + 1)
    for number, (_, data) in enumerate(ahead(batches, stage)):
        assert data.device.type == "cuda"
        assert (data == number + 1).all()
