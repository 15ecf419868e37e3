"""How long is waited: for devices that join at nearly the same time, for what is to end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from optuna_fleet.events import DeviceJoined, Event

GATHER_S = 0.15
"""For so long others are waited for that may come, or end: one plan serves all of them."""

AWAIT_S = 1.0
"""For so long in all those that are known to come, while trials run."""

LEAVE_S = 0.5
"""For so long trials that have left a node that goes wait for the others there."""


@dataclass(frozen=True, slots=True)
class PlanReady:
    """The allocator has an answer, or its process is dead."""


@dataclass(frozen=True, slots=True)
class SamplerReady:
    """A slow sampler has something to say."""


class Deadlines:
    """Of devices, or runs, by their number and the clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[int, float] = {}

    def give(self, numbers: Iterable[int], grace_s: float) -> None:
        """Let each have so many seconds from now, or fewer if it had fewer."""
        until = self._clock() + grace_s
        for number in numbers:
            self._until[number] = min(until, self._until.get(number, until))

    def begin(self, number: int, grace_s: float) -> None:
        """Let this one have so many seconds from now, unless it had some."""
        self._until.setdefault(number, self._clock() + grace_s)

    def drop(self, number: int) -> None:
        """This one needs no more time."""
        self._until.pop(number, None)

    def take_expired(self) -> list[int]:
        """Forget and return those whose time is over."""
        now = self._clock()
        expired = [number for number, until in self._until.items() if now >= until]
        for number in expired:
            del self._until[number]
        return expired

    def waits_s(self) -> list[float]:
        """Seconds until the next one, if there is any."""
        return [until - self._clock() for until in sorted(self._until.values())[:1]]


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

        If no trial has run yet, all is told `at_once`.
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

    def waits_s(self) -> list[float]:
        """Seconds until the next are due, if there are any."""
        return [self._until() - self._clock()] if self._held else []

    def _until(self) -> float:
        return self._first + (AWAIT_S if self._are_starting() else GATHER_S)

    def _all(self) -> list[Event]:
        events, self._held = self._held, []
        return events
