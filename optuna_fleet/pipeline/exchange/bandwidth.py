"""How fast bytes come in."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Bandwidth:
    """Measures the bytes per second that arrive while any do, over all lanes and links."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active = 0
        self._since = 0.0
        self._busy_s = 0.0
        self._num_bytes = 0

    @contextmanager
    def receiving(self, nbytes: int) -> Iterator[None]:
        """Measures one transfer."""
        with self._lock:
            if not self._active:
                self._since = time.perf_counter()
            self._active += 1
        received = 0
        try:
            yield
            received = nbytes
        finally:
            with self._lock:
                self._active -= 1
                self._num_bytes += received
                if not self._active:
                    self._busy_s += time.perf_counter() - self._since

    def bytes_per_s(self) -> float | None:
        """Returns the rate so far; None before the first transfer."""
        with self._lock:
            return self._num_bytes / self._busy_s if self._busy_s else None
