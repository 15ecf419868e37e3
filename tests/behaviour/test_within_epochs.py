"""Trials that move within an epoch give what they would have given undisturbed."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import ExponentialLR

from optuna_fleet import TrialError
from tests.behaviour.harness import moment
from tests.behaviour.parts import prepared, train_on
from tests.behaviour.small import evaluate, num_wrong

SIZE, BATCH, EPOCHS = 41, 4, 5
STEPS = -(-SIZE // BATCH)
EXACTLY = {"rel": 0.0, "absolute": 0.0}


def trains(trial: Any) -> None:
    """Notes samples, losses, random numbers and totals."""
    model, optimizer = prepared(trial)
    seen = trial.state.setdefault("seen", [])
    for epoch in trial.epochs(EPOCHS):
        optimizer.param_groups[0]["lr"] *= 0.9  # done again where the trial goes on
        model.train()
        for images, numbers in trial.batches("train_numbered", batch_size=BATCH, movable=True):
            loss = F.cross_entropy(model(images), numbers % 3)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trial.totals["loss"] += loss * trial.shard_size
            trial.totals["samples"] += trial.shard_size
            trial.totals["by label"] += torch.bincount(numbers % 3, minlength=3)
            counts = torch.bincount(numbers, minlength=SIZE) * bool(trial.shard_size)
            seen.append(
                {
                    "samples": trial.sum(counts).nonzero().flatten().tolist(),
                    "loss": trial.mean(loss.item(), weight=trial.shard_size),
                    "draws": [random.random(), float(np.random.rand()), torch.rand(()).item()],
                }
            )
            moment(trial)
        seen.append([trial.totals["samples"], *trial.totals["by label"].tolist()])
        trial.report(trial.totals.mean("loss", "samples"), 2 * epoch)
        trial.report(evaluate(trial, model, num_wrong) / 20, 2 * epoch + 1)
    trial.set_user_attr("model", {k: v.tolist() for k, v in model.state_dict().items()})


def keeps_all(trial: Any) -> None:
    model, optimizer = prepared(trial)
    schedule = trial.prepare(ExponentialLR(optimizer, 0.9))
    best, num_devices = trial.state.get("best", math.inf), trial.world_size
    for _ in trial.epochs(4):
        for images, labels in trial.batches("train", batch_size=10, movable=True):
            loss = train_on(trial, model, optimizer, images, labels)
            trial.totals["loss"] += loss * trial.shard_size
            best = trial.state["best"] = min(best, loss)
            moment(trial)
        trial.state["seen"].append(trial.totals["loss"])
        schedule.step()
    assert num_devices == trial.world_size


@pytest.mark.parametrize("within", [(), (2, 8)])
def test_schedules_and_variables_that_are_kept_move_along(lab: Any, within: Any) -> None:
    lab.same(keeps_all, [1, 2, 3], within=within)


def test_each_sample_is_trained_on_once_an_epoch(lab: Any) -> None:
    seen = lab.undisturbed(trains).trial.user_attrs["seen"]
    steps = [step["samples"] for step in seen if isinstance(step, dict)]
    assert len(steps) == EPOCHS * STEPS
    assert sorted(itertools.chain(*steps[:STEPS])) == list(range(SIZE))


@pytest.mark.parametrize(
    "devices", [[(0,), (1,), (2,), (3,), (0,)], [(0, 1, 2), (1, 2, 3)] * 2 + [(0, 1, 2)]]
)
def test_on_equally_many_devices_it_goes_on_bit_for_bit(lab: Any, devices: Any) -> None:
    lab.same(trains, devices, within={3, 4, 15, 30}, against=devices[0], **EXACTLY)


@pytest.mark.parametrize("waits", [True, False], ids=["at that step", "at any step"])
def test_moves_by_chance_change_nothing(lab: Any, waits: bool) -> None:
    chance = random.Random(1)
    within = set(chance.sample(range(EPOCHS * STEPS - 1), 5))
    widths = [tuple(chance.sample(range(4), chance.randint(1, 4))) for _ in range(6)]
    lab.same(trains, widths, within=within, waits=waits)


def begins_busily(trial: Any) -> None:
    """What an objective may do before its loop, and before its batches."""
    assert trial.suggest_categorical("kind", ["a"]) == "a"
    trial.set_user_attr("begun", True)
    assert trial.sum(1) == trial.world_size
    model, optimizer = prepared(trial)
    assert sum(1 for _ in trial.batches("val", batch_size=8)) == 3
    for epoch in trial.epochs(2):
        assert not trial.should_prune()
        for images, numbers in trial.batches("train_numbered", batch_size=BATCH, movable=True):
            loss = F.cross_entropy(model(images), numbers % 3)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trial.totals["loss"] += loss * trial.shard_size
            trial.totals["samples"] += trial.shard_size
            moment(trial)
        trial.report(trial.totals.mean("loss", "samples"), epoch)


def test_what_an_objective_does_at_its_beginning_it_does_again(lab: Any) -> None:
    lab.same(begins_busily, [(0,), (0, 2), (1, 2, 3)], within={3, STEPS + 4})


@pytest.mark.parametrize(("moved_at", "died_at"), [(3, 5), (7, 40)])
def test_a_trial_killed_within_an_epoch_goes_on_from_where_it_moved_to(
    lab: Any, moved_at: int, died_at: int
) -> None:
    lab.same(trains, [1, 1], within={moved_at}, kills={died_at: 0}, **EXACTLY)
    lab.same(trains, [(0, 1), (2, 3)], within={moved_at}, kills={died_at: 1})


# -- what is not left in its midst ----------------------------------------------------------------


def reads_ahead(trial: Any) -> Iterator[Any]:
    """Each batch is fetched before the one before it is used."""
    fetched = iter(trial.batches("train", batch_size=BATCH, movable=True))
    batch = next(fetched)
    for following in fetched:
        yield batch
        batch = following
    yield batch


def evaluates_first(trial: Any) -> Iterator[Any]:
    for _ in trial.batches("val", batch_size=8):
        pass
    return iter(trial.batches("train_numbered", batch_size=BATCH, movable=True))


def reads_two(trial: Any) -> Iterator[Any]:
    first, second = (
        trial.batches("train_numbered", batch_size=BATCH, movable=True) for _ in range(2)
    )
    return (pair[0] for pair in zip(first, second, strict=True))


def reads_what_can_not_move(trial: Any) -> Iterator[Any]:
    return iter(trial.batches("train_numbered", batch_size=BATCH))


def reads_what_is_movable(trial: Any) -> Any:
    return trial.batches("train_numbered", batch_size=BATCH, movable=True)


def notes_where_it_began(read: Any, *others: Any) -> Any:
    """With how many steps each run has begun."""

    def objective(trial: Any) -> float:
        model, optimizer = prepared(trial)
        for other in others:
            trial.prepare(other())
        steps = trial.state.setdefault("steps", [])
        begun = len(steps)
        for _ in trial.epochs(3):
            for images, numbers in read(trial):
                optimizer.zero_grad()
                F.cross_entropy(model(images), numbers % 3).backward()
                optimizer.step()
                steps.append(begun)
                moment(trial)
        trial.set_user_attr("begun", sorted(set(steps)))
        return float(len(steps))

    return objective


@pytest.mark.parametrize("devices", [(0,), (1, 2)])
@pytest.mark.parametrize(
    "read", [reads_ahead, evaluates_first, reads_two, reads_what_can_not_move]
)
def test_a_pass_that_can_not_go_on_elsewhere_is_read_to_its_end(
    lab: Any, devices: tuple[int, ...], read: Any
) -> None:
    flown = lab.fly(notes_where_it_began(read), [devices, devices], within={STEPS + 1})
    assert flown.endings == ["yielded", "returned"]
    assert flown.trial.user_attrs["begun"] == [0, 2 * STEPS]
    assert flown.trial.value == 3 * STEPS


class Stubborn:
    """Has a state that nobody can save."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("my state is mine")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("nobody can have saved it")


@pytest.mark.parametrize("devices", [(0,), (1, 2)])
def test_a_trial_that_can_not_be_checkpointed_goes_on_where_it_is(
    lab: Any, devices: tuple[int, ...]
) -> None:
    objective = notes_where_it_began(reads_what_is_movable, Stubborn)
    flown = lab.fly(objective, [devices, devices], within={STEPS + 1})
    assert flown.endings == ["returned"]
    assert flown.trial.value == 3 * STEPS


def fails_on_one_rank(trial: Any) -> None:
    model, optimizer = prepared(trial)
    for _ in trial.epochs(2):
        for images, numbers in reads_what_is_movable(trial):
            optimizer.zero_grad()
            F.cross_entropy(model(images), numbers % 3).backward()
            optimizer.step()
            moment(trial)
            if trial.rank == 1:
                raise TrialError("planted")


def test_a_rank_that_fails_while_the_others_stop_is_the_cause(lab: Any) -> None:
    flown = lab.fly(fails_on_one_rank, [3, 3], within={0})
    assert "planted" in str(flown.error)
    assert flown.endings == ["raised"]
