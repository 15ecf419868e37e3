"""When a process that keeps ending is started again: later each time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

_SHORT_LIFE_S = 2.0
_FIRST_S = 0.25
_LONGEST_S = 30.0


class Backoff:
    """Restarts of processes, each with a key.

    The first restart after a short life is made at once, the next ones after a pause that doubles.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._born: dict[int, float] = {}
        self._num_short: dict[int, int] = {}
        self._due: dict[int, float] = {}

    def started(self, key: int) -> None:
        """A process was started; it is no longer due."""
        self._born[key] = self._clock()
        self._due.pop(key, None)

    def killed(self, key: int) -> None:
        """A process was killed on purpose: however short its life was, that is no failure."""
        self._born[key] = -math.inf

    def may_start_again(self, key: int) -> bool:
        """A process has ended: whether to start it again now, or when it is `due`."""
        is_short = self._clock() - self._born[key] < _SHORT_LIFE_S
        number = self._num_short[key] = self._num_short.get(key, 0) + 1 if is_short else 0
        if number <= 1:
            return True
        self._postpone(key, number - 2)
        return False

    def failed(self, key: int) -> None:
        """A process could not be started."""
        number = self._num_short[key] = self._num_short.get(key, 0) + 1
        self._postpone(key, number + 1)

    def _postpone(self, key: int, exponent: int) -> None:
        self._due[key] = self._clock() + min(_FIRST_S * 2**exponent, _LONGEST_S)

    def due(self) -> list[int]:
        """What to start now; each is named once."""
        due = [key for key, when in self._due.items() if when <= self._clock()]
        for key in due:
            del self._due[key]
        return due

    def waits_s(self) -> list[float]:
        """Seconds until each restart that is postponed."""
        return [max(0.0, when - self._clock()) for when in self._due.values()]
