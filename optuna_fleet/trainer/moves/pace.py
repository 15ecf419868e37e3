"""How often a rank holds where it is, so that this takes a small part of its time."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from optuna_fleet.wire.messages import Place

_SHARE = (
    0.025  # of the time; what a step loses besides, in caches and to gloo's thread, comes on top
)
_NUM_KEPT = 7


class Pace:
    """Says which steps are held: every n-th, and the first of each run and epoch.

    All ranks must hold the same ones. So each tells the others its wish when it holds a step, and
    all take the greatest.

    Args:
        clock: Tells the time, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._spent = deque[float](maxlen=_NUM_KEPT)  # on each of the last steps that were held
        self._steps = deque[float](maxlen=_NUM_KEPT)  # what one took besides, from one to the next
        self._every = 1
        self._spent_now = 0.0
        self.begin_run()

    def begin_run(self) -> None:
        """With other ranks: the next step is held."""
        self._to_go = 0
        self._held: tuple[Place, float] | None = None

    def is_due(self, place: Place) -> bool:
        """Whether the step that begins is to be held."""
        self._to_go -= 1
        if self._to_go > 0 and place[-1] > 0:
            return False
        self._note(place, self._clock())
        return True

    def _note(self, place: Place, now: float) -> None:
        if self._held is not None:
            before, began = self._held
            self._spent.append(self._spent_now)
            if before[:-1] == place[:-1]:  # not over an epoch's end, which has other things to do
                num_steps = place[-1] - before[-1]
                self._steps.append(max(now - began - self._spent_now, 0.0) / num_steps)
        self._held, self._spent_now = (place, now), 0.0

    @contextmanager
    def spending(self) -> Iterator[None]:
        """What is done meanwhile is done to hold a step."""
        began = self._clock()
        try:
            yield
        finally:
            self._spent_now += self._clock() - began

    def wish(self) -> int:
        """Every how many steps this rank would hold one; at most twice as many as now."""
        if not self._steps or not self._spent:
            return self._every
        affordable = _SHARE * statistics.median(self._steps)
        most = 2 * self._every
        spent = statistics.median(self._spent)
        return most if spent >= most * affordable else max(1, math.ceil(spent / affordable))

    def agree(self, every: int) -> None:
        """All ranks have come to the step that this one holds; the one so many on is next."""
        self._to_go = self._every = every
