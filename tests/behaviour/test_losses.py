"""Losses that are no means over samples, and batches of unlike weight at hand, get one device."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.behaviour import losses, objectives
from tests.behaviour.words import pytestmark  # noqa: F401


@pytest.mark.parametrize("name", objectives.UNLIKE)
def test_batches_of_unlike_weight_at_hand_are_kept_on_one_device(lab: Any, name: str) -> None:
    lab.one_device(objectives.UNLIKE[name], "batches of unlike sizes")


def test_what_is_found_on_several_devices_goes_on_on_one(lab: Any) -> None:
    """From its last checkpoint, without a restart that counts."""
    objective = functools.partial(objectives.fetches_ahead_and_normalises, from_epoch=2)
    flown = lab.one_device(objective, "goes on from its last checkpoint, on one device")
    assert flown.widths == [1, 3, 1]


def test_sums_within_an_evaluation_are_of_all_ranks(lab: Any) -> None:
    """Its last batch is two samples: a rank without one would take no part in its sum."""
    words = "goes on from its last checkpoint, on 2 devices at most"
    flown = lab.one_device(objectives.sums_in_each_step, words, widths=[1, 4], most=2)
    assert flown.widths == [1, 4, 2]


def test_a_trial_that_needs_fewer_devices_than_it_may_have_fails(lab: Any) -> None:
    """Else it would be begun again and again."""
    objective = functools.partial(objectives.sums_in_each_step, min_devices=3)
    lab.refused(objective, "on 2 devices at most, but its `min_devices` is 3", widths=[3])


def test_a_loss_that_is_a_mean_is_given_all_devices(lab: Any) -> None:
    objective = functools.partial(losses.trains_linearly, loss_of=losses.cross_entropy)
    lab.same(objective, [1, 4])
