"""Bytes in memory that have a path, by which torch maps them instead of making copies."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from typing import Any


class MemoryFile:
    """Is there as long as it is referenced, or what was loaded from it.

    Args:
        size: In bytes; they are 0. What is saved at its path may have any other size.
    """

    def __init__(self, size: int = 0) -> None:
        if hasattr(os, "memfd_create"):
            self._descriptor = os.memfd_create("optuna-fleet")
            self.path = f"/proc/self/fd/{self._descriptor}"
        else:  # not on Linux
            self._descriptor, self.path = tempfile.mkstemp(prefix="optuna-fleet-")
            weakref.finalize(self, os.unlink, self.path)
        weakref.finalize(self, os.close, self._descriptor)
        os.ftruncate(self._descriptor, size)

    @classmethod
    def of(cls, data: bytes | bytearray | memoryview) -> MemoryFile:
        """One with these bytes in it."""
        made = cls(len(data))
        made.data[:] = data
        return made

    def __reduce__(self) -> Any:
        """Pickled with what is in it."""
        return MemoryFile.of, (bytes(self.data),)

    @property
    def data(self) -> memoryview:
        """What is in it; to write there writes to it."""
        is_empty = not os.fstat(self._descriptor).st_size
        return memoryview(b"" if is_empty else mmap.mmap(self._descriptor, 0))
