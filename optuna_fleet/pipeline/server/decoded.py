"""The decoded store: the deterministic beginning of each sample's transform, kept for all epochs.

One memory file that the agent owns and all preprocessors map: who prepares a sample writes it into
an *extent* lent with the order, the agent enters it into a table once the order is done. So the
table has one writer, and a preprocessor that dies in the middle leaves nothing half written.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

Extent = tuple[int, int]
"""Offset and length of a piece of the file, in bytes."""

Stored = tuple[int, int, int]
"""Index of a sample, and the offset and length of its record."""

SPARE_BYTES = 64
"""Lent with each sample, as pickles of equal content differ by a few bytes; comes back."""

ENTRY = struct.Struct("<QQ")
"""A sample's entry in the table: offset + 1 (0: it is not there), length."""


class DecodedStore:
    """The agent's side: lends extents, publishes what was written into them.

    Args:
        lengths: Number of samples of each data set.
        max_bytes: Most bytes the store may take.

    Attributes:
        is_full: It could not lend as much as was needed.
    """

    def __init__(self, lengths: Mapping[str, int], max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._first = first_entries(lengths)
        self._lengths = dict(lengths)
        self._missing = dict(lengths)
        self._prepared_bytes: dict[str, int] = {}
        self._stopped: set[str] = set()
        self._kept_bytes: Counter[str] = Counter()
        self._free: list[Extent] = []
        self._lent: dict[object, list[Extent]] = {}
        self._top = 0  # where free space without an end begins
        self._peak = 0
        self.is_full = False
        self.file = os.memfd_create("optuna-fleet-decoded", os.MFD_CLOEXEC)
        os.ftruncate(self.file, max(1, max_bytes))  # sparse: takes nothing until written
        self.table = os.memfd_create("optuna-fleet-decoded-table", os.MFD_CLOEXEC)
        os.ftruncate(self.table, max(1, sum(lengths.values()) * ENTRY.size))
        self._entries = mmap.mmap(self.table, 0)

    @property
    def used_bytes(self) -> int:
        """Bytes of memory the store takes, lent extents included."""
        return self._peak

    @property
    def wanted_bytes(self) -> int:
        """Bytes it will take in the end, as far as its data sets are known."""
        served = self._prepared_bytes.keys() - self._stopped
        wanted = sum(self._prepared_bytes[name] * self._lengths[name] for name in served)
        return min(self.max_bytes, max(wanted, self._peak))

    def serves(self, name: str) -> bool:
        """Returns whether samples of this data set are kept."""
        return name in self._prepared_bytes and name not in self._stopped

    def stop(self, name: str) -> None:
        """No more samples of a data set are kept or read.

        What it has stays taken: orders under way may still read it.
        """
        self._stopped.add(name)

    def fitting_share(self, name: str) -> float:
        """Returns about which part of a data set's samples is kept, or will be with what is left.

        What is lent counts as left: it is being filled.
        """
        length, missing = self._lengths[name], self._missing[name]
        kept = length - missing
        each = self._kept_bytes[name] / kept if kept else self._prepared_bytes[name]
        left = self.max_bytes - self._kept_bytes.total()
        return min(1.0, (kept + left / each) / length)

    def serve(self, name: str, prepared_bytes: int) -> None:
        """Begins to keep samples of about this size of a data set."""
        self._prepared_bytes[name] = prepared_bytes + SPARE_BYTES

    def lend(self, order: object, name: str, num_samples: int, room_bytes: int) -> list[Extent]:
        """Lends space for up to ``num_samples`` new samples; perhaps less, or none.

        Args:
            order: Whoever gets it, once at a time.
            name: The data set.
            num_samples: Samples it will come across.
            room_bytes: Bytes of memory that the store may grow by.
        """
        each = self._prepared_bytes[name]
        need = min(num_samples, self._missing[name]) * each
        lent, need = self._lend_free(need, each)
        self.is_full = self.is_full or need > self.max_bytes - self._top
        room_bytes += self._peak - self._top
        grown = min(need, room_bytes, self.max_bytes - self._top)
        if grown >= each:
            lent.append((self._top, grown))
            self._top += grown
            self._peak = max(self._peak, self._top)
        if lent:
            self._lent[order] = lent
        return lent

    def _lend_free(self, need: int, each: int) -> tuple[list[Extent], int]:
        """Lends what came back, and returns it and what is needed beyond it."""
        lent: list[Extent] = []
        # One in which no sample fits would only take the place of one in which it does.
        for extent in [extent for extent in self._free if extent[1] >= each]:
            if need <= 0:
                break
            offset, length = extent
            part = min(length, need)
            self._free.remove(extent)
            if part < length:
                self._free.append((offset + part, length - part))
            lent.append((offset, part))
            need -= part
        return lent, need

    def publish(self, order: object, name: str, stored: Iterable[Stored]) -> None:
        """Makes what an order has written known to all; takes back what it left."""
        left = self._lent.pop(order, [])
        for index, offset, length in stored:
            left = _without(left, offset, length)
            if self.is_kept(name, index):
                left.append((offset, length))  # another preprocessor was faster
                continue
            self._missing[name] -= 1
            self._kept_bytes[name] += length
            self._prepared_bytes[name] = max(self._prepared_bytes[name], length + SPARE_BYTES)
            place = self._place(name, index)
            # The length first: a reader that sees the offset sees the length as well.
            struct.pack_into("<Q", self._entries, place + 8, length)
            struct.pack_into("<Q", self._entries, place, offset + 1)
        free = _merged([*self._free, *left])
        if free and sum(free[-1]) == self._top:
            self._top, _ = free.pop()  # whoever comes next may have more than that
        # Beside what is written for good, scraps of a few bytes only become more and more.
        least = min(self._prepared_bytes.values(), default=0)
        self._free = [extent for extent in free if extent[1] >= least]

    def is_kept(self, name: str, index: int) -> bool:
        """Returns whether a sample is in the store."""
        return bool(ENTRY.unpack_from(self._entries, self._place(name, index))[0])

    def _place(self, name: str, index: int) -> int:
        return (self._first[name] + index) * ENTRY.size

    def close(self) -> None:
        """Frees the memory, once the preprocessors are gone too."""
        self._entries.close()
        os.close(self.file)
        os.close(self.table)


def first_entries(lengths: Mapping[str, int]) -> dict[str, int]:
    """Returns the number of each data set's first entry in the table."""
    return dict(zip(lengths, accumulate(lengths.values(), initial=0), strict=False))


def _without(extents: Sequence[Extent], offset: int, length: int) -> list[Extent]:
    """The extents less one piece that lies within one of them."""
    left: list[Extent] = []
    for start, size in extents:
        if start <= offset < start + size:
            left += [(start, offset - start), (offset + length, start + size - offset - length)]
        else:
            left.append((start, size))
    return [extent for extent in left if extent[1]]


def _merged(extents: Iterable[Extent]) -> list[Extent]:
    merged: list[Extent] = []
    for offset, length in sorted(extents):
        if merged and sum(merged[-1]) == offset:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        else:
            merged.append((offset, length))
    return merged
