"""`trial.pipeline` with several virtual workers in processes of their own."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from optuna_fleet.trainer.checkpoints import checkpoint
from optuna_fleet.wsp.turns import Pass
from tests.fleets import Leg, fleet_of

LR, BATCH = 0.05, 10


def layers() -> nn.Sequential:
    """Without what draws random numbers, or depends on who else is in a batch."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    ).double()


class Slow(nn.Module):
    """Passes on what it gets, after a while."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return x


@pytest.fixture(scope="module")
def fleet() -> Iterator[Any]:
    with fleet_of(devices=4) as fleet:
        yield fleet


def run(fleet: Any, objective: Any, *legs: Leg) -> optuna.trial.FrozenTrial:
    fleet.script = {0: legs}
    study = optuna.create_study()
    study.optimize(objective, n_trials=1, executor=fleet)
    trial = study.trials[0]
    assert trial.state is optuna.trial.TrialState.COMPLETE
    return trial


def records(trial: Any, *, folder: Path, distance: int, slow_s: float) -> float:
    """Rank 0 leaves behind what is needed to do all updates again, and what they led to."""
    model = nn.Sequential(*layers(), Slow(slow_s if trial.rank % 2 else 0.0))
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    pipeline = trial.pipeline(
        *(model, optimizer, F.cross_entropy),
        in_flight=3,
        clock_distance=distance,
        virtual_workers=2,
    )
    passes: list[Any] = []
    note = pipeline._note

    def observe(done: Any) -> None:
        note(done)
        passes.append(done)

    pipeline._note = observe
    rounds, batches = [], []
    for _ in trial.epochs(3):
        for images, labels in trial.batches("train", batch_size=BATCH, drop_last=True):
            batches.append((images.clone(), labels.clone()))
            pipeline.step(images, labels)
        losses = torch.stack(pipeline.flush()).tolist()
        starts = [
            (done.address.worker, done.turn.number, *done.tag)
            for done in passes
            if done.address.stage == 0 and done.turn.what is Pass.FORWARD
        ]
        tags = [(done.address.worker, done.turn.number, *done.tag) for done in passes]
        told = checkpoint.gather({"starts": starts, "tags": tags, "losses": losses})
        passes.clear()
        assert all(rank["losses"] == losses for rank in told)
        rounds.append({"told": told, "batches": batches, "losses": losses})
        batches = []
    trial.set_user_attr("layout", [pipeline.num_virtual_workers, pipeline.num_stages])
    holding = pipeline._holding
    holding.gather()
    if trial.rank == 0:
        torch.save(
            {"first": first, "rounds": rounds, "last": holding.model_state()}, folder / "it"
        )
    holding.release()
    return 0.0


def repeated(
    weights: dict[str, torch.Tensor], one: dict[str, Any], wave_size: int, num_workers: int
) -> dict[str, torch.Tensor]:
    """Plain SGD on one device, at the weights that the tags say; until all is flushed."""
    model = nn.Sequential(*layers(), nn.Identity())
    starts = {(worker, n): tag for rank in one["told"] for worker, n, *tag in rank["starts"]}
    updates: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
    last = len(one["batches"])

    def plus(some: dict[str, torch.Tensor], *which: tuple[int, int]) -> dict[str, torch.Tensor]:
        for key in which:
            some = {name: w + updates[key][name] for name, w in some.items()}
        return some

    def of_waves(clock: int) -> list[tuple[int, int]]:
        numbers = range(1, min(clock * wave_size, last) + 1)
        return [(worker, number) for number in numbers for worker in range(num_workers)]

    losses = []
    for number in range(1, last + 1):
        of_batch = []
        for worker in range(num_workers):
            local, clock = starts[worker, number]
            own = [(worker, n) for n in range(clock * wave_size + 1, local + 1)]
            at = plus(weights, *of_waves(clock), *own)
            leaves = {name: w.clone().requires_grad_() for name, w in at.items()}
            images, labels = one["batches"][number - 1]
            size = len(images) // num_workers
            part = slice(worker * size, (worker + 1) * size)
            loss = F.cross_entropy(functional_call(model, leaves, (images[part],)), labels[part])
            loss.backward()
            of_batch.append(loss.item())
            updates[worker, number] = {
                name: -LR / num_workers * w.grad for name, w in leaves.items()
            }
        losses.append(sum(of_batch) / num_workers)
    assert losses == pytest.approx(one["losses"], abs=1e-14)
    return plus(weights, *of_waves(last))


@pytest.mark.parametrize(("distance", "slow_s"), [(0, 0.0), (2, 0.01)])
def test_the_order_that_came_about_gives_the_same_weights_on_one_device(
    fleet: Any, tmp_path: Path, distance: int, slow_s: float
) -> None:
    objective = functools.partial(records, folder=tmp_path, distance=distance, slow_s=slow_s)
    trial = run(fleet, objective, Leg((0, 1, 2, 3)))
    assert trial.user_attrs["layout"] == [2, 2]
    left = torch.load(tmp_path / "it")
    weights = left["first"]
    for one in left["rounds"]:
        stages = [rank["tags"] for rank in one["told"]]
        assert len({tuple(map(tuple, tags)) for tags in stages}) >= 2
        weights = repeated(weights, one, wave_size=3, num_workers=2)
    furthest = max((left["last"][name] - w).abs().max().item() for name, w in weights.items())
    assert furthest <= 1e-14
