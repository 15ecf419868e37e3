"""A deadline that an agent's selector reports like anything else; no thread, no polling."""

from __future__ import annotations

import ctypes
import math
import os
import selectors
import time
from collections.abc import Callable

_libc = ctypes.CDLL(None, use_errno=True)


class _Times(ctypes.Structure):
    """``struct itimerspec``."""

    _fields_ = [(name, ctypes.c_long) for name in ("every_s", "every_ns", "first_s", "first_ns")]


class Alarm:
    """Rings once, so many seconds after it was set (a timerfd: ``os`` has them from 3.13 only).

    Args:
        selector: The agent's selector; the registered ``data`` is to be called with the mask.
        ring: Called when the time has come.
    """

    def __init__(self, selector: selectors.BaseSelector, ring: Callable[[], None]) -> None:
        # The flags of a timerfd have the values of those of `open`.
        self._fd = _libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._selector = selector
        self._ring = ring
        self.is_set = False
        selector.register(self._fd, selectors.EVENT_READ, self._rang)

    def set(self, delay_s: float | None) -> None:
        """Rings after this time and not when it was set to; None: not at all."""
        if self._fd < 0 or (delay_s is None and not self.is_set):
            return
        self.is_set = delay_s is not None
        part, whole = math.modf(0.0 if delay_s is None else max(delay_s, 1e-6))
        times = _Times(0, 0, int(whole), int(part * 1e9))
        if _libc.timerfd_settime(self._fd, 0, ctypes.byref(times), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def close(self) -> None:
        """Never rings again."""
        if self._fd >= 0:
            self.is_set = False
            self._selector.unregister(self._fd)
            self.close_in_child()

    def close_in_child(self) -> None:
        """Closes a forked child's copy; the selector is shared: leave it."""
        os.close(self._fd)
        self._fd = -1

    def _rang(self, mask: int) -> None:
        if self._fd < 0:
            return  # closed since the selector saw it
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return  # set anew since then
        self.is_set = False
        self._ring()
