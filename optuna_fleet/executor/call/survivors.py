"""Where a trial goes on whose ranks have died in part: what the others hold decides. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from optuna_fleet.wire.messages import Place


def agreed(holds: Mapping[int, Place]) -> tuple[int, ...]:
    """Returns the devices whose ranks hold the beginning of the step to go on with, in order.

    Of the steps that are to be held, each rank holds the last one that it knows all to have come
    to, the dead included. So the furthest that any holds is the right one: before it nothing is
    missing. Others, which have not heard in time, hold the one before.

    Args:
        holds: The step of each that holds any, by device.
    """
    furthest = max(holds.values(), default=None)
    return tuple(sorted(device for device, place in holds.items() if place == furthest))
