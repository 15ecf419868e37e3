"""The decoded store: the deterministic beginning of each sample, kept for all epochs.

It lies in the arena, behind the chunks, and is only ever added to. A table that all preprocessors
share says where each sample is; it says so last, so who dies in the middle leaves nothing half
written.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import numpy as np

from optuna_fleet.pipeline.chunks.arena import Arena

_USED, _DATASETS = 0, 1
"""Numbers in the table: bytes taken, and of each data set whether there was no room for all of it,
then two for each sample: its address + 1 (0: it is not there), its length."""


class DecodedStore:
    """What of the arena is from ``begin`` on; made by the agent, used by its forks.

    ``lengths`` are the numbers of samples of the data sets that are kept.
    """

    def __init__(self, arena: Arena, begin: int, lengths: Mapping[str, int]) -> None:
        self._arena = arena
        self._begin = begin
        *firsts, end = accumulate((1 + 2 * n for n in lengths.values()), initial=_DATASETS)
        self._firsts = dict(zip(lengths, firsts, strict=True))
        self._table = np.frombuffer(mmap.mmap(-1, 8 * end), np.int64)
        self._lock = os.memfd_create("optuna-fleet-decoded", os.MFD_CLOEXEC)
        self.close = weakref.finalize(self, os.close, self._lock)

    @property
    def used_bytes(self) -> int:
        """Bytes it takes of the arena."""
        return int(self._table[_USED])

    def lacks(self, name: str) -> bool:
        """Returns whether it could not take a sample of this data set, which is to be kept."""
        return name in self._firsts and bool(self._table[self._firsts[name]])

    def get(self, name: str, index: int) -> list[Any]:
        """Returns a copy of the prepared sample in a list; an empty one if it is not there."""
        from optuna_fleet.pipeline.chunks.layout import ChunkView

        entry = self._entry(name, index)
        address, length = map(int, self._table[entry : entry + 2])
        if not address:
            return []
        found = bytearray(self._arena.readable(address - 1, length))
        return ChunkView(np.frombuffer(found, np.uint8)).samples(0, 1)

    def put(self, name: str, index: int, prepared: Any) -> None:
        """Keeps a prepared sample, if there is room."""
        from optuna_fleet.pipeline.chunks.layout import Chunk

        chunk, entry = Chunk.of([prepared], collated_by_user=True), self._entry(name, index)
        length = chunk.nbytes
        with self._locked():
            address = self._begin + self.used_bytes
            if address + length > self._arena.nbytes:
                self._table[self._firsts[name]] = True
                return
            self._table[_USED] += length
        chunk.write(self._arena.writable(address, length))
        with self._locked():  # what is written is seen before the entry is
            self._table[entry + 1] = length
            self._table[entry] = address + 1

    def _entry(self, name: str, index: int) -> int:
        return self._firsts[name] + 1 + 2 * index

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Who is killed meanwhile holds the lock no more."""
        # A lock of the process, not of the descriptor, which the others have as well.
        fcntl.lockf(self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._lock, fcntl.LOCK_UN)
