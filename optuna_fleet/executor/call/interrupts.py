"""Ctrl-C ends a call, also where Python drops it."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class Interrupts:
    """While entered, a Ctrl-C that was dropped is remembered.

    Python drops what is raised while a finalizer or the callback of a weak reference runs, as they
    do each time that a database's cursor is let go of.
    """

    def __init__(self) -> None:
        self._came = False

    def __enter__(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        self._is_ours = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._is_ours:
            signal.signal(signal.SIGINT, self._hear)

    def __exit__(self, *exc_info: object) -> None:
        if self._is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._came = True
        raise KeyboardInterrupt

    def check(self) -> None:
        """Raise KeyboardInterrupt if one came, which can only have been dropped."""
        if self._came:
            raise KeyboardInterrupt
