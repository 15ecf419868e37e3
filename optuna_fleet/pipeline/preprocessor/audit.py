"""Some samples that came from the decoded store are made again, to see whether they agree."""

from __future__ import annotations

import struct
import time
import zlib
from collections.abc import Callable
from typing import Any

EVERY = 500
"""One in so many is made again."""

SHARE = 0.004
"""Most of this process' time that may be spent on it: some samples take long to make."""


class Audit:
    """Finds data sets that depend on what the pipeline can't see; for one preprocessor.

    Args:
        busy_s: Returns the seconds that the process has computed.

    Attributes:
        mismatches: By data set, the first sample that came out differently.
    """

    def __init__(self, busy_s: Callable[[], float] = time.process_time) -> None:
        self._busy_s = busy_s
        self._spent_s = 0.0
        self._last_s = 0.0
        self.mismatches: dict[str, int] = {}

    def is_due(self, epoch: int, index: int) -> bool:
        """Returns whether to make this sample again: of each epoch others."""
        if zlib.crc32(struct.pack("<QQ", epoch, index)) % EVERY:
            return False
        return self._spent_s + self._last_s <= SHARE * self._busy_s()

    def agrees(self, name: str, index: int, ours: Any, make: Callable[[], Any]) -> bool:
        """Returns whether a sample is what ``make`` gives, and notes it if not."""
        from optuna_fleet.pipeline.preprocessor.comparing import same

        began = time.perf_counter()
        try:
            agrees = same(ours, make())
        except Exception:
            agrees = True  # of the moment, perhaps: it says nothing of the store
        self._last_s = time.perf_counter() - began
        self._spent_s += self._last_s
        if not agrees:
            self.mismatches.setdefault(name, index)
        return agrees
