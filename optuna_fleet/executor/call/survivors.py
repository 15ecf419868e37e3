"""Where a trial goes on whose ranks have died in part: what the others hold decides. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from optuna_fleet.wire.messages import Place


def agreed(holds: Mapping[int, Place]) -> tuple[int, ...]:
    """Returns the devices whose ranks hold the beginning of the step to go on with, in order.

    Each rank holds the last step that it knows all to have come to, the dead included. So the
    furthest that any of them holds is the right one: before it nothing is missing, and nobody can
    have done the step itself. Others, which have not heard in time, hold the step before.

    Args:
        holds: The step of each that holds any, by device.
    """
    furthest = max(holds.values(), default=None)
    return tuple(sorted(device for device, place in holds.items() if place == furthest))
