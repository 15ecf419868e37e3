"""What an agent knows of its children, and they share: starts, kills for memory, notices."""

from __future__ import annotations

import math
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType

from optuna_fleet.pipeline.machine_memory import num_out_of_memory

LOOK_EVERY_S = 5.0
_APART_S = 1.0


class Kept:
    """A child that is started again when it has ended, if not within a second of the last time.

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


class MemoryKills:
    """Whether the kernel has just killed a process of this control group for want of memory.

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


def heed_notice(selector: selectors.BaseSelector, noticed: Callable[[], None]) -> None:
    """Take this process' first SIGTERM for a notice: its node will be taken soon.

    Until then all goes on; a second one ends it, as ever. Schedulers tell all processes of a job
    at once. So its children live through it as well; what these start in turn, as the workers of a
    data loader, ends by it.
    """
    ours, theirs = socket.socketpair()
    pid = os.getpid()

    def hear(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        theirs.send(b"!")

    def told(mask: int) -> None:
        selector.unregister(ours)
        noticed()

    def in_child() -> None:
        if os.getppid() == pid:
            signal.signal(signal.SIGTERM, _live_on)
            signal.siginterrupt(signal.SIGTERM, False)  # not all native code expects that
        elif signal.getsignal(signal.SIGTERM) is _live_on:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, hear)
    os.register_at_fork(after_in_child=in_child)
    selector.register(ours, selectors.EVENT_READ, told)


def _live_on(number: int, frame: FrameType | None) -> None:
    """Not SIG_IGN, which new programs would inherit."""
