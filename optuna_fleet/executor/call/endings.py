"""Ranks that end at nearly the same time: one plan serves all the devices that they leave."""

from __future__ import annotations

import time
from collections.abc import Callable

from optuna_fleet.events import Event, RunLingers
from optuna_fleet.executor.call.joins import GATHER_S

LEAVE_S = 0.5
"""For so long trials that have left a node that goes wait for the others there."""


class Endings:
    """Tells of runs that take longer to end than others can wait.

    Args:
        clock: Seconds since any time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[int, float] = {}

    def rank_ended(self, run_id: int, *, is_last: bool) -> None:
        """A rank has ended; the first begins the wait, the last ends it."""
        if is_last:
            self._until.pop(run_id, None)
        else:
            self._until.setdefault(run_id, self._clock() + GATHER_S)

    def leaves(self, run_id: int) -> None:
        """A run is told to leave a node that goes; others may be, too."""
        self._until.setdefault(run_id, self._clock() + LEAVE_S)

    def due(self) -> list[Event]:
        """Runs that have been waited for; each is named once."""
        now = self._clock()
        late = [run_id for run_id, until in self._until.items() if now >= until]
        for run_id in late:
            del self._until[run_id]
        return [RunLingers(run_id=run_id) for run_id in late]

    def soonest(self) -> list[float]:
        """When the next is due, if there is any."""
        return [min(self._until.values())] if self._until else []
