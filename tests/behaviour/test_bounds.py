"""`min_devices` and `max_devices`: on how many devices the fleet lets a trial fly."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.behaviour import objectives


@pytest.mark.parametrize(
    ("bounds", "first", "last"),
    [
        ({"max_devices": 2}, 1, 2),
        ({"min_devices": 3}, 1, 4),
        # Not on one again and again.
        ({"min_devices": 3, "batch_size": 1, "epochs": 4}, 1, 3),
    ],
)
def test_a_trial_says_how_many_devices_it_wants(
    lab: Any, bounds: dict[str, int], first: int, last: int
) -> None:
    flown = lab.fly(functools.partial(objectives.bounded, **bounds), widths=None)
    assert (flown.widths[0], flown.widths[-1]) == (first, last)
    least, most = bounds.get("min_devices", 1), bounds.get("max_devices", 4)
    assert all(least <= width <= most for width in flown.widths[1:])


@pytest.mark.parametrize(
    ("bounds", "complaint"),
    [
        ({"min_devices": 5}, "`min_devices` is 5, but the fleet has 4: it must not be more"),
        ({"min_devices": 3, "max_devices": 2}, "`min_devices` is 3, but `max_devices` is 2"),
        (
            {"min_devices": 3, "later": {"max_devices": 2}},
            "`min_devices` is 3, but `max_devices` is 2",
        ),
        ({"max_devices": 0}, "`max_devices` is 0, but must be a whole number >= 1, or None"),
    ],
)
def test_bounds_that_can_not_be_met_are_refused(
    lab: Any, bounds: dict[str, Any], complaint: str
) -> None:
    lab.refused(functools.partial(objectives.bounded, **bounds), complaint, widths=None)
