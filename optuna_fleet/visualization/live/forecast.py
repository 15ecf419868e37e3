"""When a sweep will be at its end, as far as its trials so far tell. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderWay:
    """A trial that is on devices.

    Attributes:
        spent_s: Device seconds that it has had.
        num_devices: How many it is on.
        left_s: Device seconds that its other epochs take, as far as is known; it may be pruned.
    """

    spent_s: float
    num_devices: int
    left_s: float | None = None


def expected_end(
    now: float,
    *,
    ended: Sequence[float],
    under_way: Sequence[UnderWay],
    num_to_come: int | None,
    num_devices: int,
    deadline: float | None = None,
) -> float | None:
    """When all trials will be done; None where nothing tells.

    Args:
        now: In any seconds.
        ended: Device seconds that each trial took that has ended, be it pruned.
        under_way: Those that are on devices.
        num_to_come: Further trials; None for as many as there is time for.
        num_devices: Devices that are there.
        deadline: When no further trial is begun, in the same seconds; None if nobody says.
    """
    known = [*ended] or [one.spent_s + one.left_s for one in under_way if one.left_s is not None]
    if not known or not num_devices or (num_to_come is None and deadline is None):
        return None
    left = [_left_s(one, ended) for one in under_way]
    last = max((s / one.num_devices for s, one in zip(left, under_way, strict=True)), default=0.0)
    ends = []
    if num_to_come is not None:
        work_s = sum(left) + num_to_come * statistics.mean(known)
        ends.append(now + max(work_s / num_devices, last))
    if deadline is not None:  # who was begun before it is not cut short
        ends.append(max(now, deadline) + last)
    return min(ends)


def _left_s(one: UnderWay, ended: Sequence[float]) -> float:
    """Device seconds that a trial will still take: like those that took longer, or to its end."""
    most_s = math.inf if one.left_s is None else one.left_s
    longer = [min(s - one.spent_s, most_s) for s in ended if s > one.spent_s]
    if longer:
        return statistics.mean(longer)
    return 0.0 if one.left_s is None else one.left_s
