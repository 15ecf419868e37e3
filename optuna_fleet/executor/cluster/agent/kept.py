"""A child that an agent keeps up: started again when it has ended, if not always at once."""

from __future__ import annotations

import math
import os
import signal
import socket
import time
from collections.abc import Callable

_APART_S = 1.0


class Kept:
    """By itself it is started no sooner than some seconds after the last time.

    Args:
        spawn: Forks it; returns its pid, and our end of the socket pair to it.
        started: Is given that end.
        failed: Told why it can't be started, once; that is tried again.

    Attributes:
        pid: Of the process; None while there is none.
        is_wanted: Whether it is started again.
    """

    def __init__(
        self,
        spawn: Callable[[], tuple[int, socket.socket]],
        started: Callable[[socket.socket], None],
        failed: Callable[[OSError], None] = lambda error: None,
    ) -> None:
        self._spawn, self._started, self._failed = spawn, started, failed
        self.pid: int | None = None
        self.is_wanted = True
        self._next, self._due, self._is_short_of = -math.inf, math.inf, False

    def start(self) -> None:
        """Start it now; later, if that is not possible."""
        self._next, self._due = time.monotonic() + _APART_S, math.inf
        try:
            self.pid, sock = self._spawn()
        except OSError as error:  # too many processes, or open files
            self._due = self._next
            if not self._is_short_of:
                self._is_short_of = True
                self._failed(error)
            return
        self._is_short_of = False
        self._started(sock)

    def start_due(self) -> None:
        """Start it if it is to be started by now."""
        if self.wait_s <= 0:
            self.start()

    def start_again(self, *, was_meant: bool = False) -> None:
        """It has ended: start it as soon as it is due. That is now if it `was_meant`."""
        self._due = 0.0 if was_meant else self._next
        self.start_due()

    def kill(self) -> None:
        """Kill it, if there is one; another may be started at once."""
        self._next = -math.inf
        if self.pid is not None:
            os.kill(self.pid, signal.SIGKILL)

    @property
    def wait_s(self) -> float:
        """Seconds until it is to be started; infinity if it is not to be."""
        return max(0.0, self._due - time.monotonic()) if self.is_wanted else math.inf
