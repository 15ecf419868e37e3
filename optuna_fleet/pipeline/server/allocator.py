"""Places in the arena: what is free, what is taken. One budget, which can't be exceeded.

Addresses below ``memory_bytes`` are memory: chunks from its beginning, the decoded store from a
border to its end. Those from ``disk_begin`` on are the spill file.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

from optuna_fleet.pipeline.chunks.arena import Extents

PAGE = 4096
"""Bytes. Pieces begin at multiples of it, so that what a reader writes into one stays in it."""


def pages(nbytes: int) -> int:
    """Returns ``nbytes`` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


class Allocator:
    """Pieces of a range of addresses; the smallest that fits is given, the lowest of these.

    Attributes:
        free_bytes: All that is free, in one piece or in many.
    """

    def __init__(self, begin: int = 0, end: int = 0) -> None:
        self.free_bytes = 0
        self._begins: list[int] = []
        self._lengths: dict[int, int] = {}
        self._by_length: list[tuple[int, int]] = []
        self.free(begin, end - begin)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yields address and length of each free piece, in the order of the addresses."""
        return iter([(begin, self._lengths[begin]) for begin in self._begins])

    def allocate(self, nbytes: int) -> int | None:
        """Returns where so many bytes are taken now; None if there are none in one piece."""
        found = bisect_left(self._by_length, (nbytes, 0))
        if found == len(self._by_length):
            return None
        length, begin = self._by_length[found]
        self._remove(begin)
        if length > nbytes:
            self._add(begin + nbytes, length - nbytes)
        return begin

    def free(self, begin: int, nbytes: int) -> None:
        """Takes a piece back, or part of one."""
        if nbytes <= 0:
            return
        at = bisect_left(self._begins, begin)
        if at < len(self._begins) and self._begins[at] == begin + nbytes:
            nbytes += self._remove(self._begins[at])
        if at and self._begins[at - 1] + self._lengths[self._begins[at - 1]] == begin:
            begin = self._begins[at - 1]
            nbytes += self._remove(begin)
        self._add(begin, nbytes)

    def cut_off(self, border: int) -> list[tuple[int, int]]:
        """Returns what is free from ``border`` on, which is no longer here."""
        at = bisect_right(self._begins, border) - 1
        gone = [(b, self._lengths[b]) for b in self._begins[max(0, at) :]]
        gone = [(b, n) for b, n in gone if b + n > border]
        for begin, _ in gone:
            self._remove(begin)
            self._add(begin, border - begin)
        return [(max(begin, border), begin + n - max(begin, border)) for begin, n in gone]

    def _add(self, begin: int, nbytes: int) -> None:
        if nbytes > 0:
            insort(self._begins, begin)
            insort(self._by_length, (nbytes, begin))
            self._lengths[begin] = nbytes
            self.free_bytes += nbytes

    def _remove(self, begin: int) -> int:
        nbytes = self._lengths.pop(begin)
        del self._begins[bisect_left(self._begins, begin)]
        del self._by_length[bisect_left(self._by_length, (nbytes, begin))]
        self.free_bytes -= nbytes
        return nbytes


class Space:
    """The addresses of an arena: memory for chunks, memory for decoded samples, disk for chunks.

    Whole pages are given out.

    Attributes:
        border: Where the decoded store's part of the memory begins.
        decoded: What is free of that.
        used: Bytes that chunks take, in memory.
        spilled: Bytes that they take on the disk.
    """

    def __init__(self, extents: Extents) -> None:
        self.border = extents.memory_bytes // PAGE * PAGE
        self.disk_begin = disk_begin = extents.disk_begin
        self.decoded = Allocator()
        self.used = self.spilled = 0
        self._disk_bytes = extents.disk_bytes // PAGE * PAGE
        self._memory = Allocator(0, self.border)
        self._disk = Allocator(disk_begin, disk_begin + self._disk_bytes)

    @property
    def largest(self) -> int:
        """The largest chunk that could ever fit."""
        return max(self.border, self._disk_bytes)

    def capacity(self, *, on_disk: bool) -> int:
        """Returns the bytes that chunks may take, in memory or on the disk."""
        return self._disk_bytes if on_disk else self.border

    def has(self, address: int, nbytes: int) -> bool:
        """Returns whether chunks may be there; where they may not any more, they go when idle."""
        if self.is_on_disk(address):
            return bool(self._disk_bytes)
        return address + nbytes <= self.border

    def allocate(self, nbytes: int, *, spill: bool = True) -> int | None:
        """Returns the address of a piece of whole pages; if memory is full, ``spill`` to disk."""
        if (address := self._memory.allocate(nbytes)) is not None:
            self.used += nbytes
        elif spill and (address := self._disk.allocate(nbytes)) is not None:
            self.spilled += nbytes
        return address

    def could_fit(self, nbytes: int, idle: int, idle_disk: int) -> bool:
        """Returns whether there would be room if so much were free beside what is."""
        in_memory = self._memory.free_bytes + idle
        return nbytes <= in_memory or nbytes <= self._disk.free_bytes + idle_disk

    def free(self, address: int, nbytes: int) -> None:
        """Takes back what a chunk had; what lies beyond the border is the decoded store's."""
        if self.is_on_disk(address):
            self.spilled -= nbytes
            if self._disk_bytes:
                self._disk.free(address, nbytes)
            return
        self.used -= nbytes
        below = max(0, min(nbytes, self.border - address))
        self._memory.free(address, below)
        self.decoded.free(address + below, nbytes - below)

    def is_on_disk(self, address: int) -> bool:
        """Returns whether this is an address of the spill file."""
        return address >= self.disk_begin

    def reserve(self, border: int) -> None:
        """Leaves memory from this address on to the decoded store, as soon as it is free."""
        if border < self.border:
            self.border = border
            for begin, length in self._memory.cut_off(border):
                self.decoded.free(begin, length)

    def close_disk(self) -> None:
        """The disk takes nothing any more."""
        self._disk_bytes, self._disk = 0, Allocator()
