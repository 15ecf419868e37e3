"""The one queue of a driver: what happens is an event in it, and the caller's thread takes it."""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from optuna_fleet.executor.fleet.listener import Listener


class Readable(Protocol):
    """Something with a file descriptor that becomes readable."""

    def fileno(self) -> int:
        """The descriptor."""
        ...


class Inbox:
    """Messages, ends of connections, departures, timers: in the order in which they came.

    Any thread may put, and any signal handler; one thread takes.

    Attributes:
        sockets: Whose thread is the only one that waits for descriptors and for times.
    """

    sockets: Listener

    def __init__(self) -> None:
        self._queue: SimpleQueue[Iterable[tuple[Any, Callable[[], None] | None]]] = SimpleQueue()
        self._there: deque[tuple[Any, Callable[[], None] | None]] = deque()
        self._copies: set[int] = set()  # of descriptors that are waited for

    def put(self, event: Any) -> None:
        """Tell whoever takes; an exception is raised there, now and ever after."""
        self._queue.put(((event, None),))

    def put_all(self, events: Iterable[tuple[Any, Callable[[], None] | None]]) -> None:
        """Several at once, each with what to call when it is taken."""
        self._queue.put(events)

    def get(self, timeout_s: float | None = None) -> Any:
        """Take the next event, waiting for it; None if there is none within so many seconds."""
        if not self._there:
            try:
                self._there.extend(self._queue.get(timeout=timeout_s))
            except Empty:
                return None
        event, taken = self._there.popleft()
        if taken is not None:
            taken()
        elif isinstance(event, BaseException):
            self.put(event)
            raise event
        return event

    def later(self, seconds: float, event: Any) -> None:
        """Put an event so many seconds from now, behind all that was said by then."""
        self.sockets.call(self.sockets.later, seconds, self.put, event)

    def when_readable(self, what: Readable, event: Any) -> None:
        """Put an event once this is readable, or its other end is gone."""
        number = os.dup(what.fileno())  # which stays valid, whatever becomes of it
        self._copies.add(number)

        def told(mask: int) -> None:
            self.sockets.unwatch(number)
            self._copies.discard(number)
            os.close(number)
            self.put(event)

        self.sockets.call(self.sockets.watch, number, select.EPOLLIN, told)

    def close(self) -> None:
        """Forget what was waited for, when `sockets` are closed."""
        while self._copies:
            os.close(self._copies.pop())
