"""Places in the arena: what is free, what is taken. One budget, which can't be exceeded.

Addresses below ``memory_bytes`` are memory: chunks from its beginning, the decoded store from a
border to its end. Those from ``disk_begin`` on are the spill file.
"""

from __future__ import annotations

from bisect import bisect_left, insort
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
        gone = [(begin, n) for begin, n in self if begin + n > border]
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


class Part:
    """The memory of an arena, or its disk: what chunks take there.

    Attributes:
        begin: Its first address.
        end: Chunks may take nothing from here on.
        gaps: The free pieces of that.
        used: Bytes that chunks take.
        idle: Bytes of those that are there and that nobody holds.
        held: Address and length of those that passes hold.
        lent: Bytes of these.
    """

    def __init__(self, begin: int, nbytes: int) -> None:
        self.begin = begin
        self.end = begin + nbytes // PAGE * PAGE
        self.gaps = Allocator(self.begin, self.end)
        self.used = self.idle = self.lent = 0
        self.held: set[tuple[int, int]] = set()


class Space:
    """The addresses of an arena: memory for chunks, memory for decoded samples, disk for chunks.

    Whole pages are given out.

    Attributes:
        memory: For chunks, up to where the decoded store begins.
        decoded: What is free of the decoded store's part of the memory.
        disk: For chunks that do not fit into memory.
    """

    def __init__(self, extents: Extents) -> None:
        self.memory = Part(0, extents.memory_bytes)
        self.decoded = Allocator()
        self.disk = Part(extents.disk_begin, extents.disk_bytes)

    @property
    def largest(self) -> int:
        """The largest chunk that could ever fit."""
        return max(part.end - part.begin for part in (self.memory, self.disk))

    def part(self, address: int) -> Part:
        """Returns what an address is in."""
        return self.memory if address < self.disk.begin else self.disk

    def has(self, address: int, nbytes: int) -> bool:
        """Returns whether chunks may be there; where they may not any more, they go when idle."""
        return address + nbytes <= self.part(address).end

    def allocate(self, nbytes: int, *, spill: bool = True) -> int | None:
        """Returns the address of a piece of whole pages; if memory is full, ``spill`` to disk."""
        for part in (self.memory, self.disk) if spill else (self.memory,):
            if (address := part.gaps.allocate(nbytes)) is not None:
                part.used += nbytes
                return address
        return None

    def could_fit(self, nbytes: int) -> bool:
        """Returns whether there would be room without the idle chunks, in however many pieces."""
        parts = (self.memory, self.disk)
        return any(nbytes <= part.gaps.free_bytes + part.idle for part in parts)

    def free(self, address: int, nbytes: int) -> None:
        """Takes back what a chunk had; what lies beyond the border is the decoded store's."""
        part = self.part(address)
        part.used -= nbytes
        here = max(0, min(nbytes, part.end - address))
        part.gaps.free(address, here)
        if part is self.memory:
            self.decoded.free(address + here, nbytes - here)

    def reserve(self, border: int) -> None:
        """Leaves memory from this address on to the decoded store, as soon as it is free."""
        if border < self.memory.end:
            self.memory.end = border
            for begin, length in self.memory.gaps.cut_off(border):
                self.decoded.free(begin, length)

    def close_disk(self) -> None:
        """The disk takes nothing any more."""
        self.disk.end, self.disk.gaps = self.disk.begin, Allocator()
