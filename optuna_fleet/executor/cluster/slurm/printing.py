"""Prints where nobody may wait for the terminal."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading

_MOST_WAITING = 64
_CLOSE_LIMIT_S = 2.0


class Printer:
    """Prints to standard error on a thread: a terminal may block (Ctrl-S), as may a full pipe."""

    def __init__(self) -> None:
        self._texts: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="optuna-fleet-says", daemon=True)
        self._thread.start()

    @property
    def is_full(self) -> bool:
        """Whether whoever has more to print should wait."""
        return self._texts.qsize() >= _MOST_WAITING

    def put(self, text: str) -> None:
        """Have this printed."""
        self._texts.put(text)

    def close(self) -> None:
        """Wait a little until all is printed."""
        self._texts.put(None)
        self._thread.join(_CLOSE_LIMIT_S)

    def _run(self) -> None:
        while (text := self._texts.get()) is not None:
            # No `print`: the lock that it holds while it blocks is wanted when Python ends.
            with contextlib.suppress(OSError, ValueError):
                if (stream := sys.__stderr__) is not None:
                    left = text.encode(stream.encoding, "backslashreplace")
                    while left:
                        left = left[os.write(stream.fileno(), left) :]
