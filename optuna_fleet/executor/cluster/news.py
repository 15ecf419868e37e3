"""What an engine's threads find out, and its driver fetches."""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Iterable, Sequence

from optuna_fleet.exceptions import LaunchError
from optuna_fleet.executor.cluster.engine import Departure, Readable


class News:
    """Departures, in order. Told by any thread or signal handler: nothing here takes a lock."""

    def __init__(self) -> None:
        self._items: deque[Departure | LaunchError] = deque()
        self._ours, self._theirs = socket.socketpair()
        for sock in (self._ours, self._theirs):
            sock.setblocking(False)

    def tell(self, item: Departure | LaunchError) -> None:
        """Say something; an error is the last."""
        self._items.append(item)
        with contextlib.suppress(OSError):  # full of wake-ups already, or closed
            self._theirs.send(b"!")

    def fetch(self) -> list[Departure]:
        """What was told since the last time.

        Raises:
            LaunchError: That was told; it is raised again by each later call.
        """
        with contextlib.suppress(OSError):
            while self._ours.recv(4096):
                pass
        departures: list[Departure] = []
        while self._items:
            match self._items[0]:
                case Departure() as departure:
                    departures.append(departure)
                    self._items.popleft()
                case LaunchError() as error:
                    if departures:
                        self._theirs.send(b"!")
                        break
                    raise error
        return departures

    def fileno(self) -> int:
        """What is readable while there is something to fetch."""
        return self._ours.fileno()

    def close(self) -> None:
        """There will be no more."""
        self._ours.close()
        self._theirs.close()


class TellsNews:
    """The part of an `Engine` whose threads find things out, and tell `news`, from `open` on."""

    news: News

    def gone(self) -> Sequence[Departure]:
        """See `Engine`."""
        return self.news.fetch()

    def readables(self) -> Iterable[Readable]:
        """See `Engine`."""
        return [self.news]
