"""Which processes of the fleet were started and are not ready in time. Pure but for its clock."""

from __future__ import annotations

import time
from collections.abc import Callable


class Startup:
    """Watches processes from their start until they are ready.

    Args:
        limit_s: Seconds that this may take; None for no limit.
        clock: Seconds since any time.
    """

    def __init__(self, limit_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._due: dict[int, tuple[float, str]] = {}
        self._looked = clock()

    def started(self, pid: int, name: str) -> None:
        """A process was started."""
        if self._limit_s is not None:
            self._due[pid] = self._clock() + self._limit_s, name

    def over(self, pid: int) -> None:
        """A process is ready, or has ended."""
        self._due.pop(pid, None)

    def patience_s(self) -> float | None:
        """Seconds until the next look at those that are awaited; None if there are none."""
        return None if self._limit_s is None or not self._due else self._limit_s / 4

    def late(self) -> list[tuple[int, str]]:
        """Pid, and what is wrong in words, of those that are late now; each is named once."""
        now, before = self._clock(), self._looked
        self._looked = now
        if self._limit_s is None:
            return []
        if now - before > self._limit_s / 2:  # we were away, and what they said waits to be read
            self._due = {pid: (now + self._limit_s, name) for pid, (_, name) in self._due.items()}
        late = [(pid, name) for pid, (due, name) in self._due.items() if due <= now]
        for pid, _ in late:
            del self._due[pid]
        return [(pid, f"{name} was not ready within {self._limit_s:g} s") for pid, name in late]
