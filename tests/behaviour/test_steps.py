"""Trials that count steps: they see what trials that count epochs do, wherever they train."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.behaviour.harness import moment
from tests.behaviour.parts import prepared
from tests.behaviour.small import evaluate, num_wrong

SIZE, BATCH = 41, 8  # 6 steps an epoch
STEPS, EVERY = 20, 4  # periods over an epoch's end, and up to one


def trains(loop: Any, *, drop_last: bool = False, movable: bool = False) -> Any:
    """Notes the loss and the samples of each step."""

    def objective(trial: Any) -> None:
        model, optimizer = prepared(trial)
        steps = trial.state.setdefault("steps", [])
        lengths = trial.state.setdefault("lengths", [])
        for period in loop(trial):
            model.train()
            batches = trial.batches("train_numbered", BATCH, drop_last=drop_last, movable=movable)
            for images, numbers in batches:
                loss = F.cross_entropy(model(images), numbers % 3)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                seen = torch.bincount(numbers, minlength=SIZE) * bool(trial.shard_size)
                seen = trial.sum(seen).nonzero().flatten().tolist()
                steps.append([trial.mean(loss.item(), weight=trial.shard_size), seen])
                moment(trial)
            lengths.append(len(batches))
            trial.report(evaluate(trial, model, num_wrong) / 20, period)
        trial.set_user_attr("steps", steps)
        trial.set_user_attr("lengths", lengths)

    return objective


def in_periods(trial: Any) -> Any:
    return trial.steps(STEPS, every=EVERY)


def in_epochs(trial: Any) -> Any:
    return trial.epochs(4)


ALONG, MOVABLE = trains(in_periods), trains(in_periods, movable=True)


@pytest.mark.parametrize("drop_last", [False, True])
def test_periods_cut_the_epochs_that_other_trials_have(lab: Any, drop_last: bool) -> None:
    by_steps, by_epochs = (
        lab.undisturbed(trains(loop, drop_last=drop_last)).trial.user_attrs
        for loop in (in_periods, in_epochs)
    )
    assert by_steps["steps"] == by_epochs["steps"][:STEPS]
    assert by_steps["lengths"] == [EVERY] * 5
    per_epoch = SIZE // BATCH + (not drop_last)
    first = list(itertools.chain(*(seen for _, seen in by_steps["steps"][:per_epoch])))
    assert len(set(first)) == len(first) == (SIZE if not drop_last else SIZE // BATCH * BATCH)


@pytest.mark.parametrize("widths", [[2], [3], [2, 2, 1], [1, 3, 3, 2]])
def test_results_do_not_depend_on_where(lab: Any, widths: list[int]) -> None:
    lab.same(ALONG, widths)


def test_a_move_within_a_period(lab: Any) -> None:
    # In the midst of an epoch, at its end, and after it.
    lab.same(MOVABLE, [1, 2, (1, 2), 1], within=(1, 4, 9))


def test_a_death_within_a_period(lab: Any) -> None:
    lab.same(ALONG, [1, 2], kills={2: 0, 10: 1})


def counts(trial: Any) -> None:
    """How many batches there are, where."""
    prepared(trial)
    before = len(trial.batches("train", 8))
    for _ in trial.steps(10, every=8):
        read = [len(list(trial.batches(name))) for name in ("train", "val")]
        trial.set_user_attr(str(len(trial.user_attrs)), [len(trial.batches("train")), *read])
    for _ in trial.steps(10, every=4):
        break
    trial.set_user_attr("around", [before, len(trial.batches("train"))])


def test_how_many_batches_there_are(lab: Any) -> None:
    given = lab.undisturbed(counts).trial.user_attrs
    assert given == {"0": [8, 8, 3], "1": [2, 2, 3], "around": [6, 6]}


@pytest.mark.parametrize("given", [(0, 5), (10, 0), (10, 2.5), (True, 1)])
def test_what_is_no_number_of_steps(lab: Any, given: tuple[Any, Any]) -> None:
    def objective(trial: Any) -> None:
        trial.steps(given[0], every=given[1])

    lab.refused(objective, "must be a whole number >= 1", widths=[1])
