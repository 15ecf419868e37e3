"""Devices that join, and ranks that end, at nearly the same time: one plan serves all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from optuna_fleet.events import DeviceJoined, Event, RunLingers

GATHER_S = 0.15
"""For so long others are waited for that may come."""

AWAIT_S = 1.0
"""For so long in all those that are known to come, while trials run."""

LEAVE_S = 0.5
"""For so long trials that have left a node that goes wait for the others there."""


class Joins:
    """Holds back devices that join, until no more of them are waited for."""

    def __init__(
        self, are_starting: Callable[[], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._are_starting = are_starting
        self._clock = clock
        self._held: list[Event] = []
        self._first = 0.0

    def held_back(self, events: Sequence[Event], *, at_once: bool = False) -> list[Event]:
        """What to tell now: nothing of devices that join; anything else comes after these.

        Args:
            events: What has changed.
            at_once: No trial has run yet: tell all.
        """
        is_first = not self._held
        self._held += events
        if at_once or not all(isinstance(event, DeviceJoined) for event in events):
            return self._all()
        if is_first:
            self._first = self._clock()
        return []

    def due(self) -> list[Event]:
        """Devices that have waited long enough."""
        return self._all() if self._held and self._clock() >= self._until() else []

    def soonest(self) -> list[float]:
        """When the next are due, if there are any."""
        return [self._until()] if self._held else []

    def _until(self) -> float:
        return self._first + (AWAIT_S if self._are_starting() else GATHER_S)

    def _all(self) -> list[Event]:
        events, self._held = self._held, []
        return events


class Endings:
    """Tells of runs that take longer to end than others can wait."""

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
