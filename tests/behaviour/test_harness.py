"""The harness sees what is wrong: tests that it runs can fail."""

from __future__ import annotations

from typing import Any

import pytest

from tests.behaviour.harness import moment
from tests.behaviour.parts import prepared, train_on


def trains(trial: Any, *, value: Any = lambda trial: 0.0) -> float:
    model, optimizer = prepared(trial)
    for epoch in trial.epochs(3):
        for images, labels in trial.batches("train_numbered", 10, movable=True):
            loss = train_on(trial, model, optimizer, images, labels % 3)
            moment(trial)
        trial.report(loss, epoch)
    return float(value(trial))


def returns_its_width(trial: Any) -> float:
    return trains(trial, value=lambda trial: trial.world_size)


def notes_its_width(trial: Any) -> None:
    trains(trial)
    trial.set_user_attr("nested", {"list": [1, [trial.world_size]]})


@pytest.mark.parametrize("objective", [returns_its_width, notes_its_width])
def test_what_differs_is_seen(lab: Any, objective: Any) -> None:
    with pytest.raises(AssertionError, match="differ from those on one device"):
        lab.same(objective, [1, 2])


def test_what_was_not_flown_is_seen(lab: Any) -> None:
    with pytest.raises(AssertionError):
        lab.same(trains, [1, 2, 1, 2])  # it has three epochs
    with pytest.raises(AssertionError):
        lab.same(trains, [1, 2], within={100})
    with pytest.raises(AssertionError):
        lab.same(trains, [1], kills={100: 0})


def test_what_is_right_is_neither_refused_nor_kept_on_one_device(lab: Any) -> None:
    with pytest.raises(AssertionError, match="not refused"):
        lab.refused(trains)
    with pytest.raises(AssertionError, match=r"on \[1, 3\] devices"):
        lab.one_device(trains, "", widths=[1, 3])


def fails(trial: Any) -> None:
    raise KeyError("on any device")


def test_another_error_is_no_refusal(lab: Any) -> None:
    with pytest.raises(KeyError, match="on any device"):
        lab.same(fails)


def is_never_done(trial: Any) -> None:
    prepared(trial)
    for _ in trial.epochs(2):
        for _ in trial.batches("train", 10):
            moment(trial)


def test_a_rank_dies_once_and_so_often_as_it_is_told(lab: Any) -> None:
    flown = lab.fly(is_never_done, [2, 1], kills={1: 1, 3: 0, 8: 0})
    assert flown.endings.count("lost") == len(flown.deaths) == 3
    assert flown.error is None
