"""The decoded store: the deterministic beginning of each sample's transform, kept for all epochs.

It lies in the arena, behind the chunks. Who prepares a sample writes it into an *extent* lent with
the order, the agent enters it into a table once the order is done. So the table has one writer,
and a preprocessor that dies in the middle leaves nothing half written.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from optuna_fleet.pipeline.messages import Extent, Stored
from optuna_fleet.pipeline.server.allocator import Allocator

SPARE_BYTES = 64
"""Lent with each sample, as pickles of equal content differ by a few bytes; comes back."""

ENTRY = struct.Struct("<QQ")
"""A sample's entry in the table: address + 1 (0: it is not there), length."""


@dataclass(slots=True)
class _Kept:
    """What is known of one data set.

    Attributes:
        first: The number of its first entry in the table.
        missing: Samples that are not there.
        kept_bytes: What those take that are.
        each_bytes: What one may take; 0 if none are kept.
    """

    first: int
    missing: int
    kept_bytes: int = 0
    each_bytes: int = 0


class DecodedStore:
    """The agent's side: lends extents of what is ``free``, publishes what was written into them.

    ``lengths`` are the numbers of samples of the data sets.

    Attributes:
        table: Inherited by preprocessors, who read it.
        used_bytes: Bytes of memory the store takes, lent extents included.
        is_full: It could not lend as much as was needed.
    """

    def __init__(self, lengths: Mapping[str, int], max_bytes: int, free: Allocator) -> None:
        self._max_bytes = max_bytes
        self._free = free
        self._lengths = dict(lengths)
        self._kept = {
            name: _Kept(first, lengths[name]) for name, first in first_entries(lengths).items()
        }
        self._lent: dict[object, list[Extent]] = {}
        self.used_bytes = 0
        self.is_full = False
        self.table = mmap.mmap(-1, max(1, sum(lengths.values()) * ENTRY.size))

    @property
    def wanted_bytes(self) -> int:
        """Bytes it will take in the end, as far as its data sets are known."""
        served = filter(self.serves, self._kept)
        wanted = sum(self._kept[name].each_bytes * self._lengths[name] for name in served)
        return min(self._max_bytes, max(wanted, self.used_bytes))

    def serve(self, name: str, prepared_bytes: int) -> None:
        """Begins to keep samples of about this size of a data set."""
        self._kept[name].each_bytes = prepared_bytes + SPARE_BYTES

    def serves(self, name: str) -> bool:
        """Returns whether samples of this data set are kept."""
        return self._kept[name].each_bytes > 0

    def fitting_share(self, name: str) -> float:
        """Returns about which part of a data set's samples is kept, or will be with what is left.

        What is lent counts as left: it is being filled.
        """
        length, kept = self._lengths[name], self._kept[name]
        number = length - kept.missing
        each = kept.kept_bytes / number if number else kept.each_bytes
        left = self._max_bytes - sum(other.kept_bytes for other in self._kept.values())
        return min(1.0, (number + left / each) / length)

    def lend(self, order: object, name: str, num_samples: int) -> list[Extent]:
        """Lends an order space for up to ``num_samples`` new samples; perhaps less, or none."""
        each = self._kept[name].each_bytes
        need = min(num_samples, self._kept[name].missing) * each
        lent: list[Extent] = []
        while need > 0:
            # A piece in which no sample fits would only take the place of one in which it does.
            largest = max((length for _, length in self._free), default=0)
            part = min(need, largest)
            if part < each or (address := self._free.allocate(part)) is None:
                self.is_full = self.is_full or self.wanted_bytes >= self._max_bytes
                break
            lent.append((address, part))
            self.used_bytes += part
            need -= part
        if lent:
            self._lent[order] = lent
        return lent

    def publish(self, order: object, name: str, stored: Iterable[Stored]) -> None:
        """Makes what an order has written known to all; takes back what it left."""
        left, kept = self._lent.pop(order, []), self._kept[name]
        for index, address, length in stored:
            if self.is_kept(name, index):
                continue  # another preprocessor was faster
            left = _without(left, address, length)
            kept.missing -= 1
            kept.kept_bytes += length
            kept.each_bytes = max(kept.each_bytes, length + SPARE_BYTES)
            place = self._place(name, index)
            # The length first: a reader that sees the address sees the length as well.
            struct.pack_into("<Q", self.table, place + 8, length)
            struct.pack_into("<Q", self.table, place, address + 1)
        for address, length in left:
            self._free.free(address, length)
            self.used_bytes -= length

    def is_kept(self, name: str, index: int) -> bool:
        """Returns whether a sample is in the store."""
        return bool(ENTRY.unpack_from(self.table, self._place(name, index))[0])

    def _place(self, name: str, index: int) -> int:
        return (self._kept[name].first + index) * ENTRY.size


def first_entries(lengths: Mapping[str, int]) -> dict[str, int]:
    """Returns the number of each data set's first entry in the table."""
    return dict(zip(lengths, accumulate(lengths.values(), initial=0), strict=False))


def _without(extents: Sequence[Extent], address: int, length: int) -> list[Extent]:
    """The extents less one piece that lies within one of them."""
    left: list[Extent] = []
    for start, size in extents:
        if start <= address < start + size:
            end = address + length
            left += [(start, address - start), (end, start + size - end)]
        else:
            left.append((start, size))
    return [extent for extent in left if extent[1]]
