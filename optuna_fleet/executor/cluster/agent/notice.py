"""A SIGTERM that is a notice: the node will be taken soon, and until then all goes on."""

from __future__ import annotations

import os
import signal
import socket
from types import FrameType


class Notice:
    """Readable from this process' first SIGTERM on; a second one ends it, as ever.

    Schedulers tell all processes of a job at once. So its children live through it as well; what
    these start in turn, as the workers of a data loader, ends by it.
    """

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        self._pid = os.getpid()
        signal.signal(signal.SIGTERM, self._hear)
        os.register_at_fork(after_in_child=self._in_child)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._theirs.send(b"!")

    def _in_child(self) -> None:
        if os.getppid() == self._pid:
            signal.signal(signal.SIGTERM, _live_on)
            signal.siginterrupt(signal.SIGTERM, False)  # not all native code expects that
        elif signal.getsignal(signal.SIGTERM) is _live_on:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def fileno(self) -> int:
        """What becomes readable."""
        return self._ours.fileno()


def _live_on(number: int, frame: FrameType | None) -> None:
    """Not SIG_IGN, which new programs would inherit."""
