"""On real GPUs: the same small trials over CUDA and NCCL."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import optuna
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from optuna_fleet import Limits
from optuna_fleet.pipeline.reader.batches import Batch
from optuna_fleet.trainer.feed import CudaStage, ahead
from tests.fleets import Leg, fleet_of, small_model, train

NUM_GPUS = torch.cuda.device_count()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS == 0, reason="needs a CUDA device"),
    pytest.mark.usefixtures("gpus", "afresh"),
]
needs_two = pytest.mark.skipif(NUM_GPUS < 2, reason="needs two CUDA devices")


def losses_on(fleet: Any, devices: tuple[int, ...], objective: Any = train) -> list[float]:
    study = optuna.create_study()
    fleet.script = {0: [Leg(devices)]}
    study.optimize(objective, n_trials=1, executor=fleet)
    losses: list[float] = study.trials[0].user_attrs["losses"]
    return losses


def test_a_trial_trains_on_a_gpu_as_on_the_cpu() -> None:
    with (
        fleet_of(devices=1, device_type="cuda") as gpus,
        fleet_of(devices=1, device_type="cpu") as cpus,
    ):
        assert losses_on(gpus, (0,)) == pytest.approx(losses_on(cpus, (0,)), rel=1e-6)


def channels_last() -> nn.Module:
    return small_model().to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def with_vectors_normalised() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(36, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)
    ).double()


def trains(make: Callable[[], nn.Module]) -> Any:
    def objective(trial: Any) -> float:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        model, optimizer = trial.prepare(model, optimizer)
        losses = []
        for _ in trial.epochs(2):
            for images, labels in trial.batches("train", batch_size=10):
                loss = F.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(float(trial.mean(loss.item(), weight=trial.shard_size)))
        trial.set_user_attr("losses", losses)
        return losses[-1]

    return objective


@needs_two
@pytest.mark.parametrize("make", [small_model, channels_last, with_vectors_normalised])
def test_two_gpus_give_the_losses_of_one(make: Callable[[], nn.Module]) -> None:
    with fleet_of(devices=2, device_type="cuda") as gpus:
        alone = losses_on(gpus, (0,), trains(make))
        assert losses_on(gpus, (0, 1), trains(make)) == pytest.approx(alone, rel=1e-10)


def fails_on_one_rank(trial: Any) -> float:
    model = trial.prepare(small_model())
    for step, (images, labels) in enumerate(trial.batches("train", batch_size=10)):
        if trial.number == 0 and step == 2 and trial.rank == trial.world_size - 1:
            raise KeyError("meant")
        F.cross_entropy(model(images), labels).backward()
    return float(os.getpid())


def asserts_on_the_device(trial: Any) -> float:
    model = trial.prepare(small_model())
    for images, labels in trial.batches("train", batch_size=10):
        wrong = labels + 99 if trial.number == 0 else labels
        F.cross_entropy(model(images), wrong).backward()
        torch.cuda.synchronize()
    return 1.0


@pytest.mark.parametrize("devices", [(0,), pytest.param((0, 1), marks=needs_two)])
@pytest.mark.parametrize(
    ("objective", "error"), [(fails_on_one_rank, KeyError), (asserts_on_the_device, RuntimeError)]
)
def test_an_error_is_the_trials_own_and_the_next_one_trains(
    devices: tuple[int, ...], objective: Any, error: type[Exception]
) -> None:
    study = optuna.create_study()
    with fleet_of(devices=len(devices), device_type="cuda", limits=Limits(hang_s=60.0)) as gpus:
        gpus.script = {0: [Leg(devices)], 1: [Leg(devices)]}
        study.optimize(objective, n_trials=2, executor=gpus, catch=(error,))
    assert [trial.state.name for trial in study.trials] == ["FAIL", "COMPLETE"]


def test_batches_arrive_pinned_ahead_and_finished() -> None:
    size = 1 << 22  # large enough for kernels to run while the next is on its way
    batches = (
        Batch(data={"x": torch.full((size,), n)}, local_size=1, global_size=1) for n in range(20)
    )
    stage = CudaStage(torch.device("cuda", 0), lambda data: data["x"] + 1)
    totals = []
    for _, data in ahead(batches, stage):
        assert data.device.type == "cuda"
        totals.append((data * 1.0).sqrt().square().sum())
        del data
    expected = [size * (number + 1.0) for number in range(20)]
    assert torch.stack(totals).tolist() == pytest.approx(expected)
