"""Whether the kernel has just killed a process of this control group for want of memory."""

from __future__ import annotations

import time
from collections.abc import Callable

from optuna_fleet.pipeline.limits import num_out_of_memory

LOOK_EVERY_S = 5.0


class MemoryKills:
    """Compares the kernel's counter with what it was a few seconds ago.

    It counts the kills of a whole group, so one that was long ago says nothing about a process
    that has died now; but one that was killed may take seconds to give its memory back and die.
    """

    def __init__(
        self,
        count: Callable[[], int] = num_out_of_memory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._count, self._clock = count, clock
        self._before = self._latest = count()
        self._due = clock() + LOOK_EVERY_S

    def look(self) -> None:
        """To be called every `LOOK_EVERY_S`; more often is no harm."""
        if self._clock() >= self._due:
            self._before, self._latest = self._latest, self._count()
            self._due = self._clock() + LOOK_EVERY_S

    def take(self) -> bool:
        """Whether there was one; it explains one death only."""
        before, self._before = self._before, self._count()
        self._latest = self._before
        return self._latest > before
