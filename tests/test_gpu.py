"""On real GPUs: the same small trials over CUDA, and NCCL where there are two of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import optuna
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from optuna_fleet import Limits, LocalCluster
from optuna_fleet.events import RateMeasured
from optuna_fleet.pipeline.reader.client import Batch
from optuna_fleet.trainer.data.feed import feed
from tests.fleets import Leg, fleet_of, small_model, train

NUM_GPUS = torch.cuda.device_count()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS == 0, reason="needs a CUDA device"),
    pytest.mark.usefixtures("gpus", "afresh"),
]
needs_two = pytest.mark.skipif(NUM_GPUS < 2, reason="needs two CUDA devices")
ON_ONE_GPU = {"devices": 1, "cluster": LocalCluster(slots_per_device=2)}
ON_TWO_GPUS = {"devices": 2}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(ON_ONE_GPU, id="on-one-gpu"),
        pytest.param(ON_TWO_GPUS, marks=needs_two, id="on-two-gpus"),
    ],
)
def pair(gpus: None, afresh: None, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Two slots."""
    with fleet_of(device_type="cuda", limits=Limits(hang_s=60.0), **request.param) as fleet:
        yield fleet


def told_by(fleet: Any, legs: Sequence[Leg], objective: Any = train) -> dict[str, Any]:
    study = optuna.create_study()
    fleet.script = {0: legs}
    study.optimize(objective, n_trials=1, executor=fleet)
    told: dict[str, Any] = study.trials[0].user_attrs
    return told


def losses_on(fleet: Any, devices: tuple[int, ...], objective: Any = train) -> Any:
    return told_by(fleet, [Leg(devices)], objective)["losses"]


def test_a_trial_trains_on_a_gpu_as_on_the_cpu(pair: Any) -> None:
    with fleet_of(devices=1, device_type="cpu") as cpus:
        assert losses_on(pair, (0,)) == pytest.approx(losses_on(cpus, (0,)), rel=1e-6)


def test_moved_between_slots_it_gives_the_losses_of_one_that_stays(pair: Any) -> None:
    legs = [Leg((0,), 1), Leg((0, 1), 3), Leg((1,), 4), Leg((1, 0))]
    moved, stayed = told_by(pair, legs), told_by(pair, [Leg((0,))])
    assert moved["losses"] == pytest.approx(stayed["losses"], rel=1e-10)
    assert moved["noise"] == stayed["noise"]


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
            for images, labels in trial.batches("train", batch_size=12):
                loss = F.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(float(trial.mean(loss.item(), weight=trial.shard_size)))
        trial.set_user_attr("losses", losses)
        return losses[-1]

    return objective


@pytest.mark.parametrize("make", [small_model, channels_last, with_vectors_normalised])
def test_two_slots_give_the_losses_of_one(pair: Any, make: Callable[[], nn.Module]) -> None:
    alone = losses_on(pair, (0,), trains(make))
    assert losses_on(pair, (0, 1), trains(make)) == pytest.approx(alone, rel=1e-10)


def tells_its_group(trial: Any) -> float:
    trial.prepare(small_model())
    for _ in trial.batches("train", batch_size=10):
        pass
    trial.set_user_attr("backend", dist.get_backend())
    return 1.0


def test_only_ranks_on_one_gpu_do_without_nccl(pair: Any) -> None:
    together = told_by(pair, [Leg((0, 1))], tells_its_group)["backend"]
    devices = pair._runner._runtime.agents.devices.values()
    shared = len({device.visible for device in devices}) == 1  # whatever it is called
    assert together == ("gloo" if shared else "nccl")
    assert told_by(pair, [Leg((0,))], tells_its_group)["backend"] == "nccl"


def draws_masks(trial: Any) -> float:
    """Tells the sum of the ranks' masks, and what they draw on the CPU, at each step."""
    model = trial.prepare(small_model())
    masks = trial.state.setdefault("masks", [])
    for _ in trial.epochs(3):
        for images, _ in trial.batches("train", batch_size=10):
            mask = F.dropout(torch.ones(64, device=images.device))
            drawn = torch.rand(3)
            assert torch.equal(trial.mean(drawn), drawn)
            masks.append(trial.sum(mask).tolist())
    model(images)
    trial.set_user_attr("masks", masks)
    return 1.0


def test_masks_differ_between_ranks_and_are_drawn_again_after_a_move(pair: Any) -> None:
    stayed = told_by(pair, [Leg((0, 1))], draws_masks)["masks"]
    assert all(2.0 in mask for mask in stayed)  # kept by one rank, and twice as large for that
    assert len(set(map(tuple, stayed))) == len(stayed)
    assert told_by(pair, [Leg((0, 1), 1), Leg((1, 0))], draws_masks)["masks"] == stayed
    legs = [Leg((0,), 1), Leg((0, 1))]
    epoch = len(stayed) // 3
    assert told_by(pair, legs, draws_masks)["masks"][epoch:] == stayed[epoch:]


def keeps_tensors(trial: Any) -> float:
    """Tells where the tensors of its state are, after each epoch."""
    model = trial.prepare(small_model())
    state, where = trial.state, []
    state.setdefault("seen", [torch.zeros((), device=trial.device), {"steps": torch.zeros(())}])
    for _ in trial.epochs(3):
        for images, _ in trial.batches("train", batch_size=12, movable=True):
            state["seen"][0].add_(images.new_ones(()))
            state["seen"][1]["steps"].add_(1.0)
        where.append([state["seen"][0].device.type, state["seen"][1]["steps"].device.type])
    model(images)
    trial.set_user_attr("where", where)
    return float(state["seen"][0])


def test_tensors_of_the_state_are_where_they_were_after_a_move(pair: Any) -> None:
    where = told_by(pair, [Leg((0,), 1), Leg((0, 1), 2), Leg((1,))], keeps_tensors)["where"]
    assert set(map(tuple, where)) == {("cuda", "cpu")}


@pytest.mark.parametrize("devices", [(0,), (0, 1)])
def test_a_rate_is_measured(pair: Any, devices: tuple[int, ...]) -> None:
    told_by(pair, [Leg(devices, measure=True)], partial(train, epochs=10))  # 50 batches
    rates = [event.samples_per_s for event in pair.events if isinstance(event, RateMeasured)]
    assert len(rates) == 1
    assert 1 < rates[0] < 1e6


def test_a_sweep_of_several_trials_on_two_slots(pair: Any) -> None:
    study = optuna.create_study()
    study.optimize(train, n_trials=5, executor=pair)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 5


def fails_on_one_rank(trial: Any) -> float:
    model = trial.prepare(small_model())
    for step, (images, labels) in enumerate(trial.batches("train", batch_size=10)):
        if trial.number == 0 and step == 2 and trial.rank == trial.world_size - 1:
            raise KeyError("meant")
        F.cross_entropy(model(images), labels).backward()
    return 1.0


def asserts_on_the_device(trial: Any) -> float:
    model = trial.prepare(small_model())
    for images, labels in trial.batches("train", batch_size=10):
        wrong = labels + 99 if trial.number == 0 else labels
        F.cross_entropy(model(images), wrong).backward()
        torch.cuda.synchronize()
    return 1.0


def wants_too_much(trial: Any) -> float:
    model = trial.prepare(small_model())
    for images, labels in trial.batches("train", batch_size=10):
        if trial.number == 0:
            torch.empty(1 << 46, dtype=torch.uint8, device=images.device)
        F.cross_entropy(model(images), labels).backward()
    return 1.0


@pytest.mark.parametrize("devices", [(0,), (0, 1)])
@pytest.mark.parametrize(
    ("objective", "error"),
    [
        (fails_on_one_rank, KeyError),
        (asserts_on_the_device, RuntimeError),
        (wants_too_much, torch.cuda.OutOfMemoryError),
    ],
)
def test_an_error_is_the_trials_own_and_the_next_one_trains(
    pair: Any, devices: tuple[int, ...], objective: Any, error: type[Exception]
) -> None:
    study = optuna.create_study()
    pair.script = {0: [Leg(devices)], 1: [Leg(devices)]}
    study.optimize(objective, n_trials=2, executor=pair, catch=(error,))
    assert [trial.state.name for trial in study.trials] == ["FAIL", "COMPLETE"]


def stages(trial: Any) -> float:
    size = 1 << 22  # large enough for kernels to run while the next is on its way
    batches = (
        Batch(data={"x": torch.full((size,), n)}, local_size=1, global_size=1) for n in range(20)
    )
    totals = []
    for _, data in feed(batches, torch.device("cuda", 0), lambda data: data["x"] + 1):
        assert data.device.type == "cuda"
        totals.append((data * 1.0).sqrt().square().sum())
        del data
    trial.set_user_attr("totals", torch.stack(totals).tolist())
    return float(size)


def test_batches_arrive_pinned_ahead_and_finished(pair: Any) -> None:
    """In a trainer: CUDA can't be used in this process if it began without GPUs."""
    study = optuna.create_study()
    study.optimize(stages, n_trials=1, executor=pair)
    expected = [study.best_value * (number + 1.0) for number in range(20)]
    assert study.trials[0].user_attrs["totals"] == pytest.approx(expected)
