"""Places in the arena: what is free, what is taken. One budget, which can't be exceeded."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

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
    """What of an arena is for chunks; whole pages are given out.

    Attributes:
        nbytes: All of it.
        gaps: The free pieces.
        used: Bytes that chunks take.
        idle: Bytes of those that are there and that nobody holds.
        held: Address and length of those that passes hold.
        lent: Bytes of these.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes // PAGE * PAGE
        self.gaps = Allocator(0, self.nbytes)
        self.used = self.idle = self.lent = 0
        self.held: set[tuple[int, int]] = set()

    def allocate(self, nbytes: int) -> int | None:
        """Returns the address of a piece of whole pages; None if there is none."""
        if (address := self.gaps.allocate(nbytes)) is not None:
            self.used += nbytes
        return address

    def could_fit(self, nbytes: int) -> bool:
        """Returns whether there would be room without the idle chunks, in however many pieces."""
        return nbytes <= self.gaps.free_bytes + self.idle

    def free(self, address: int, nbytes: int) -> None:
        """Takes back what a chunk had."""
        self.used -= nbytes
        self.gaps.free(address, nbytes)
