"""A trial that moves, or whose processes die, gives what it would have given undisturbed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.behaviour.harness import moment
from tests.behaviour.parts import convnet, note, note_evaluation, prepared, sgd, step, train_on
from tests.behaviour.small import small_model, train, train_epoch

EXACTLY = {"rel": 0.0, "absolute": 0.0}


# -- between epochs -------------------------------------------------------------------------------


@pytest.mark.parametrize("widths", [[(3,)], [1] * 6])
def test_one_device_after_the_other_gives_the_same_bits(lab: Any, widths: Any) -> None:
    lab.same(train, widths, **EXACTLY)


def test_moved_from_three_to_three_it_gives_the_same_bits(lab: Any) -> None:
    lab.same(train, [(0, 1, 2), (1, 2, 3), (3, 1, 0)], against=(0, 1, 2), **EXACTLY)


# Batch 10: shards of 5+5, 4+3+3; the last batch is 1+1, 1+1+0.
@pytest.mark.parametrize("widths", [[2], [3], [4], [1, 2, 3, 3, 1]])
def test_the_same_losses_on_any_devices(lab: Any, widths: Any) -> None:
    lab.same(train, widths)


def two_loops(trial: Any) -> None:
    """Two models, one after the other, each with a loop of its own."""
    for part in range(2):
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        model, optimizer = trial.prepare(model, optimizer)
        losses = trial.state.setdefault(f"losses {part}", [])
        for _ in trial.epochs(3):
            train_epoch(trial, model, optimizer, losses, batch_size=10)
    trial.set_user_attr("losses", [trial.state[f"losses {part}"] for part in range(2)])


def test_a_trial_with_two_loops_goes_on_in_the_one_it_was_in(lab: Any) -> None:
    lab.same(two_loops, [1] * 5, **EXACTLY)
    lab.same(two_loops, [1, 3, 2, 3, 1])


def train_by_chance(trial: Any) -> None:
    """A layer of its own is skipped at random, as torch's generator of the CPU says."""
    model, skipped = trial.prepare(small_model(), nn.BatchNorm2d(1).double())
    optimizer = trial.prepare(sgd([*model.parameters(), *skipped.parameters()]))
    for _ in trial.epochs(3):
        for images, labels in trial.batches("train", batch_size=10):
            inputs = images if torch.rand(()) < 0.5 else skipped(images)
            loss = F.cross_entropy(model(inputs), labels)
            step(optimizer, loss)
            note(trial, loss)


def test_what_is_decided_by_a_random_number_is_alike_on_all_ranks(lab: Any) -> None:
    lab.same(train_by_chance, [2, 3, 1])


# -- what is made anew before the loop is restored in it ------------------------------------------


def makes_the_scheduler_late(trial: Any) -> None:
    model, optimizer = prepared(trial)
    warmup = trial.prepare(torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3))
    for _ in trial.epochs(4):
        train_epoch(trial, model, optimizer, trial.state.setdefault("seen", []), batch_size=10)
        warmup.step()


def makes_weights_late(trial: Any) -> None:
    model, optimizer = prepared(trial)
    nn.init.constant_(model[0].weight, 0.1)
    for _ in trial.epochs(4):
        train_epoch(trial, model, optimizer, trial.state.setdefault("seen", []), batch_size=10)


def counts_in_its_state(trial: Any) -> None:
    model, optimizer = prepared(trial)
    trial.state["steps"] = 0
    for _ in trial.epochs(4):
        for images, labels in trial.batches("train", batch_size=10):
            train_on(trial, model, optimizer, images, labels)
            trial.state["steps"] += 1
    trial.set_user_attr("steps", trial.state["steps"])


@pytest.mark.parametrize(
    "objective", [makes_the_scheduler_late, makes_weights_late, counts_in_its_state]
)
def test_what_is_made_anew_before_the_loop_is_restored_in_it(lab: Any, objective: Any) -> None:
    lab.same(objective, [1, 1, 1], **EXACTLY)
    lab.same(objective)


# -- deaths ---------------------------------------------------------------------------------------


def trains_and_may_die(trial: Any) -> None:
    model, optimizer = prepared(trial)
    for epoch in trial.epochs(4):
        for images, labels in trial.batches("train", batch_size=10):  # five of them
            loss = train_on(trial, model, optimizer, images, labels)
            trial.totals["loss"] += loss * trial.shard_size
            moment(trial)
        note_evaluation(trial, model)
        trial.report(trial.totals["loss"], epoch)


@pytest.mark.parametrize(
    ("widths", "kills"),
    [
        ([1], {2: 0}),  # there is no checkpoint yet
        ([1, 1], {7: 0, 17: 0}),
        ([1, 3], {12: 2}),
        ([3, 2, 1], {1: 0, 9: 1, 14: 0}),
    ],
)
def test_what_died_goes_on_from_the_last_checkpoint(lab: Any, widths: Any, kills: Any) -> None:
    lab.same(trains_and_may_die, widths, kills=kills)


# -- what is begun once ---------------------------------------------------------------------------


def opens_its_log_once(trial: Any) -> None:
    """The log is somewhere else: it knows how often it was opened, and goes on if it was."""
    if not trial.is_resumed:
        trial.set_user_attr("opened", trial.user_attrs.get("opened", 0) + 1)
    model, optimizer = prepared(trial)
    for _ in trial.epochs(3):
        for images, labels in trial.batches("train", batch_size=10, movable=True):
            train_on(trial, model, optimizer, images, labels)
            moment(trial)


@pytest.mark.parametrize(
    "disturbed", [{}, {"widths": [1, 3, 3], "within": {2, 8}}, {"widths": [1, 1], "kills": {7: 0}}]
)
def test_a_trial_that_goes_on_knows_it(lab: Any, disturbed: Any) -> None:
    assert lab.same(opens_its_log_once, **disturbed).trial.user_attrs["opened"] == 1


# -- objects of torch -----------------------------------------------------------------------------


def ragged_state(trial: Any) -> None:
    """Anything may be in `trial.state`: it comes back as it was."""
    model, optimizer = prepared(trial, convnet)
    state = trial.state.setdefault("mine", {"best": None, "table": torch.zeros(3), "seen": set()})
    for epoch in trial.epochs(4):
        for images, labels in trial.batches("train", batch_size=10):
            loss = train_on(trial, model, optimizer, images, labels)
        state["best"] = min(loss, state["best"] or loss)
        state["table"] = state["table"] + torch.tensor([1.0, epoch, 2.0])
        state["seen"].add((epoch, "epoch"))
    names = [f"{number} {name}" for number, name in sorted(state["seen"])]
    trial.set_user_attr("state", [state["best"], state["table"].tolist(), names])


def test_what_is_in_the_state_comes_back_as_it_was(lab: Any) -> None:
    lab.same(ragged_state, [1, 1, 1], **EXACTLY)
    lab.same(ragged_state)


def draws(trial: Any) -> Iterator[Any]:
    import random

    import numpy as np

    yield [random.random(), float(np.random.rand()), torch.rand(()).item()]


def notes_draws(trial: Any) -> None:
    """The numbers that each epoch, and what comes after the last one, draws."""
    model, optimizer = prepared(trial)
    for _ in trial.epochs(4):
        for images, labels in trial.batches("train", batch_size=10):
            train_on(trial, model, optimizer, images, labels)
            trial.state["seen"] += draws(trial)
    trial.state["seen"] += draws(trial)


def test_random_numbers_go_on_where_they_were(lab: Any) -> None:
    lab.same(notes_draws, [1, 1, 1], **EXACTLY)
    lab.same(notes_draws, [3, 1, 2])
