"""`trial.pipeline` with several virtual workers in processes of their own."""

from __future__ import annotations

import functools
import re
import time
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from optuna_fleet.trainer.gradients import collectives
from optuna_fleet.virtual_workers.wsp import Pass
from tests.fleets import Leg, run

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
        # 20 batches are more waves than the clock distance lets anybody be ahead.
        for images, labels in trial.batches("train", batch_size=2, drop_last=True):
            batches.append((images.clone(), labels.clone()))
            pipeline.step(images, labels)
        losses = torch.stack(pipeline.flush()).tolist()
        starts = [
            (done.address.worker, done.turn.number, *done.tag)
            for done in passes
            if done.address.stage == 0 and done.turn.what is Pass.FORWARD
        ]
        tags = [(done.address.worker, done.turn.number, *done.tag) for done in passes]
        told = collectives.gather({"starts": starts, "tags": tags, "losses": losses})
        passes.clear()
        assert all(rank["losses"] == losses for rank in told)
        rounds.append({"told": told, "batches": batches, "losses": losses})
        batches = []
    trial.set_user_attr("layout", [pipeline.num_virtual_workers, pipeline.num_stages])
    holding = pipeline.holding
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


@pytest.mark.parametrize(("distance", "slow_s"), [(0, 0.0), (4, 0.01)])
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
        assert any(clock > 0 for tags in stages for *_, clock in tags)  # all have pulled
        weights = repeated(weights, one, wave_size=3, num_workers=2)
    furthest = max((left["last"][name] - w).abs().max().item() for name, w in weights.items())
    assert furthest <= 1e-14


# -- what a trial comes to ------------------------------------------------------------------------


def with_noise_and_statistics() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(64, 8),
        nn.Tanh(),
        nn.Linear(8, 3),
    ).double()


def momentum(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)


def trains(
    trial: Any,
    *,
    options: dict[str, Any],
    make: Any = momentum,
    build: Any = with_noise_and_statistics,
) -> float:
    model = build()
    pipeline = trial.pipeline(model, make(model.parameters()), F.cross_entropy, **options)
    losses = trial.state.setdefault("losses", [])
    found = 0.0
    for epoch in trial.epochs(4):
        for images, labels in trial.batches("train", batch_size=BATCH):
            if (loss := pipeline.step(images, labels)) is not None:
                losses.append(loss.item())
        losses += [loss.item() for loss in pipeline.flush()]
        found = pipeline.evaluate(trial.batches("val", batch_size=8))
        trial.report(found, epoch)
    trial.set_user_attr("found", found)
    trial.set_user_attr("losses", losses)
    trial.set_user_attr("layout", [pipeline.num_virtual_workers, pipeline.num_stages])
    trial.set_user_attr("in_flight", pipeline.in_flight)
    return found


def result(trial: optuna.trial.FrozenTrial) -> tuple[list[float], float]:
    assert trial.state is optuna.trial.TrialState.COMPLETE
    assert len(trial.user_attrs["losses"]) == 20
    return trial.user_attrs["losses"], trial.user_attrs["found"]


def without_statistics() -> nn.Sequential:
    model = with_noise_and_statistics()
    model[1] = nn.GroupNorm(2, 4).double()
    return model


@pytest.mark.parametrize("in_flight", [4, 3])
def test_with_flushes_they_do_what_one_device_does(fleet: Any, in_flight: int) -> None:
    options = {"in_flight": in_flight, "virtual_workers": 2, "max_grad_norm": 0.5}
    objective = functools.partial(
        trains, options=options, build=without_statistics, make=torch.optim.AdamW
    )
    alone, several = run(fleet, objective, Leg((0,))), run(fleet, objective, Leg((0, 1, 2, 3)))
    legs = Leg((3, 1), until_epoch=2), Leg((0, 1, 2))  # 2 x 1; 2 stages and 1
    moved = run(fleet, objective, *legs)
    layouts = [trial.user_attrs["layout"] for trial in (alone, several, moved)]
    assert layouts == [[1, 1], [2, 2], [2, 2]]
    assert result(several)[0] == pytest.approx(result(alone)[0], rel=1e-10)
    assert result(several)[1] == pytest.approx(result(alone)[1], rel=1e-10)
    assert result(moved)[0] == pytest.approx(result(alone)[0], rel=1e-10)


class Tokens(nn.Module):
    """Of an image; their embeddings have sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5, sparse=True)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.embedding((images.flatten(1).abs() * 5).long() % 11)
        return embedded.mean(1)


def test_sparse_gradients_are_added_up_and_stay_sparse(fleet: Any) -> None:
    objective = functools.partial(
        trains,
        options={"virtual_workers": 2},
        build=lambda: nn.Sequential(Tokens()).double(),
        make=lambda parameters: torch.optim.SparseAdam(parameters, lr=0.01),
    )
    alone, several = run(fleet, objective, Leg((0,))), run(fleet, objective, Leg((0, 1)))
    assert several.user_attrs["layout"] == [2, 1]
    assert result(several)[0] == pytest.approx(result(alone)[0], rel=1e-10)


WAVES = {"in_flight": 3, "clock_distance": 0, "virtual_workers": 2}


def test_they_go_on_from_a_checkpoint_as_if_nothing_had_been(fleet: Any) -> None:
    objective = functools.partial(trains, options=WAVES)
    at_once = run(fleet, objective, Leg((0, 1, 2, 3)))
    moved = run(fleet, objective, Leg((0, 1, 2, 3), until_epoch=1), Leg((2, 1, 3, 0)))
    assert result(moved) == result(at_once)
    assert result(at_once)[0][-1] < result(at_once)[0][0]


def without_noise() -> nn.Sequential:
    model = without_statistics()
    model[3] = nn.Identity()
    return model


def test_one_minibatch_at_a_time_is_sgd_on_whole_batches_whatever_the_layout(fleet: Any) -> None:
    """With momentum and weight decay; the last batch has one sample for two virtual workers."""
    options = {**WAVES, "in_flight": 1}
    objective = functools.partial(trains, options=options, build=without_noise)
    plain = functools.partial(trains, options={"in_flight": 1}, build=without_noise)
    expected = run(fleet, plain, Leg((0,)))
    several = run(fleet, objective, Leg((0, 1, 2, 3)))
    legs = Leg((0, 1, 2, 3), until_epoch=1), Leg((2, 1, 0), until_epoch=3), Leg((3,))
    moved = run(fleet, objective, *legs)
    assert result(several)[0] == pytest.approx(result(expected)[0], rel=1e-10)
    assert result(moved)[0] == pytest.approx(result(expected)[0], rel=1e-10)
    assert moved.user_attrs["found"] == pytest.approx(expected.user_attrs["found"], rel=1e-10)


def test_what_has_no_memory_for_several_is_one_pipeline(fleet: Any) -> None:
    options = {**WAVES, "memory_bytes": 45_000}
    trial = run(fleet, functools.partial(trains, options=options), Leg((0, 1, 2, 3)))
    assert trial.user_attrs["layout"] == [1, 4]


def test_in_flight_are_as_many_as_help_unless_it_is_told(fleet: Any) -> None:
    options = {"clock_distance": 0, "virtual_workers": 2}
    free = run(fleet, functools.partial(trains, options=options), Leg((0, 1, 2, 3)))
    told = run(fleet, functools.partial(trains, options=WAVES), Leg((0, 1, 2, 3)))
    assert free.user_attrs["in_flight"] == 3
    assert result(free) == result(told)


@pytest.mark.parametrize(
    ("layout", "found", "in_flight"),
    [("NP", [1, 4], 4), ("ED", [4, 1], 1), ("ED-local", [4, 1], 1)],
)
def test_a_layout_can_be_chosen(
    fleet: Any, log: Any, layout: str, found: list[int], in_flight: int
) -> None:
    options = {"clock_distance": 1, "layout": layout}
    trial = run(fleet, functools.partial(trains, options=options), Leg((0, 1, 2, 3)))
    assert (trial.user_attrs["layout"], trial.user_attrs["in_flight"]) == (found, in_flight)
    assert result(trial)[0][-1] < result(trial)[0][0]
    assert "takes the layout" not in log.getvalue()


def test_what_a_clock_distance_alone_gave_is_told(fleet: Any, log: Any) -> None:
    objective = functools.partial(trains, options={"clock_distance": 1})
    trial = run(fleet, objective, Leg((0, 1, 2, 3), until_epoch=2), Leg((0,)))
    said = [line for line in log.getvalue().splitlines() if "takes the layout" in line]
    assert len(said) == 1  # and none for one device
    assert re.search(r"here [1-4] x [1-4]( or [1-4])? \(ED; .* with \d in flight", said[0])
    assert trial.user_attrs["layout"] == [1, 1]
