"""Which processes of the fleet were started and are not ready in time. Pure but for its clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from optuna_fleet.wire.node_messages import ProcessId


class Startup:
    """Watches processes from their start until they are ready: trainers, and agents by node."""

    def __init__(self, limit_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._due: dict[str | ProcessId, tuple[float, str]] = {}
        self._looked = clock()

    def started(self, process: str | ProcessId, name: str) -> None:
        """A process was started."""
        if self._limit_s is not None:
            self._due[process] = self._clock() + self._limit_s, name

    def over(self, process: str | ProcessId) -> None:
        """A process is ready, or has ended."""
        self._due.pop(process, None)

    def forget_trainers(self, agent: str) -> None:
        """An agent is gone, and all that it had started."""
        for process in [p for p in self._due if isinstance(p, ProcessId) and p.agent == agent]:
            del self._due[process]

    def patience_s(self) -> float | None:
        """Seconds until the next look at those that are awaited; None if there are none."""
        return None if self._limit_s is None or not self._due else self._limit_s / 4

    def late(self) -> list[tuple[Any, str]]:
        """Those that are late now, and what is wrong in words; each is named once."""
        now, before = self._clock(), self._looked
        self._looked = now
        if self._limit_s is None:
            return []
        if now - before > self._limit_s / 2:  # we were away, and what they said waits to be read
            self._due = {p: (now + self._limit_s, name) for p, (_, name) in self._due.items()}
        late = [(process, name) for process, (due, name) in self._due.items() if due <= now]
        for process, _ in late:
            del self._due[process]
        return [(p, f"{name} was not ready within {self._limit_s:g} s") for p, name in late]
