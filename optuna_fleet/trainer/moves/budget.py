"""How much of a rank's time goes into copies that are needed only if other ranks die."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Budget:
    """A share of the time, saved up for one copy at most.

    Args:
        share: Of the time.
        clock: Tells the time, in seconds.
    """

    def __init__(self, share: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._share = share
        self._clock = clock
        self._since = clock()
        self._saved_s = 0.0
        self._spent_s = deque([0.0], maxlen=2)

    def is_enough(self) -> bool:
        """Whether it is enough for a copy that takes as long as the faster of the last two."""
        now, cost_s = self._clock(), min(self._spent_s)
        self._saved_s = min(self._saved_s + self._share * (now - self._since), cost_s)
        self._since = now
        return self._saved_s >= cost_s

    @contextmanager
    def spending(self) -> Iterator[None]:
        """A copy is made meanwhile."""
        began = self._clock()
        try:
            yield
        finally:
            self._since, self._saved_s = self._clock(), 0.0
            self._spent_s.append(self._since - began)
