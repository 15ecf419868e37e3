"""A child that an agent keeps up: started again when it has ended, if not always at once."""

from __future__ import annotations

import math
import os
import signal
import socket
import time
from collections.abc import Callable

_SHORT_LIFE_S = 2.0
_FIRST_S = 0.25
_LONGEST_S = 30.0


class Kept:
    """The first restart after a short life is made at once, the next after pauses that double.

    Args:
        spawn: Forks it; returns its pid, and our end of the socket pair to it.
        started: Is given that end.
        failed: Told why it can't be started; that is tried again.

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
        self._born, self._due, self._num_short = 0.0, math.inf, 0

    def start(self) -> None:
        """Start it now; later, if that is not possible."""
        self._due = math.inf
        try:
            self.pid, sock = self._spawn()
        except OSError as error:  # too many processes, or open files
            self._num_short += 1
            self._postpone(self._num_short + 1)
            self._failed(error)
            return
        self._born = time.monotonic()
        self._started(sock)

    def start_due(self) -> None:
        """Start it if it is to be started by now."""
        if self.wait_s <= 0:
            self.start()

    def start_again(self, *, was_meant: bool = False) -> None:
        """It has ended: start it now or later. A short life is no failure if it `was_meant`."""
        if not self.is_wanted:
            return
        is_short = time.monotonic() - self._born < _SHORT_LIFE_S and not was_meant
        self._num_short = self._num_short + 1 if is_short else 0
        if self._num_short <= 1:
            self.start()
        else:
            self._postpone(self._num_short - 2)

    def kill(self) -> None:
        """Kill it, if there is one: however short its life was, that is no failure."""
        self._born = -math.inf
        if self.pid is not None:
            os.kill(self.pid, signal.SIGKILL)

    def _postpone(self, exponent: int) -> None:
        self._due = time.monotonic() + min(_FIRST_S * 2**exponent, _LONGEST_S)

    @property
    def wait_s(self) -> float:
        """Seconds until it is to be started; infinity if it is not to be."""
        return max(0.0, self._due - time.monotonic()) if self.is_wanted else math.inf
