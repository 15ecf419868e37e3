"""The driver's end of what engines tell: departures of nodes, in order."""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from typing import Protocol

from optuna_fleet.exceptions import LaunchError
from optuna_fleet.executor.cluster.engine import Departure


class Readable(Protocol):
    """Something a selector can wait for."""

    def fileno(self) -> int:
        """Its file descriptor."""
        ...


class Departures:
    """An `Inbox` that can be waited for. No lock is taken: a signal handler may `put`."""

    def __init__(self) -> None:
        self._items: deque[Departure | LaunchError] = deque()
        self._ours, self._theirs = socket.socketpair()
        for sock in (self._ours, self._theirs):
            sock.setblocking(False)

    def put(self, event: Departure | LaunchError) -> None:
        """See `Inbox`."""
        self._items.append(event)
        with contextlib.suppress(OSError):  # full of wake-ups already, or closed
            self._theirs.send(b"!")

    def take(self) -> list[Departure]:
        """What was put since the last time.

        Raises:
            LaunchError: That is next; it is raised again by each later call.
        """
        with contextlib.suppress(OSError):
            while self._ours.recv(4096):
                pass
        departures: list[Departure] = []
        while self._items:
            event = self._items[0]
            if isinstance(event, LaunchError):
                if not departures:
                    raise event
                self._theirs.send(b"!")
                break
            departures.append(event)
            self._items.popleft()
        return departures

    def fileno(self) -> int:
        """What is readable while there is something to take."""
        return self._ours.fileno()

    def close(self) -> None:
        """There will be no more."""
        self._ours.close()
        self._theirs.close()
