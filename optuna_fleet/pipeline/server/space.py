"""Places in the arena: what is free, what is taken. One budget, which can't be exceeded."""

from __future__ import annotations

from bisect import bisect_left

PAGE = 4096
"""Bytes. Pieces begin at multiples of it, so that what a reader writes into one stays in it."""


def pages(nbytes: int) -> int:
    """Returns ``nbytes`` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


class Space:
    """Gives out pieces of whole pages: of the smallest hole that fits, the lowest of these.

    Attributes:
        nbytes: All of it.
        used: Bytes that are taken.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes // PAGE * PAGE
        self.used = self.nbytes
        self._holes: list[tuple[int, int]] = []  # begin and end, in order
        self.free(0, self.nbytes)

    def allocate(self, nbytes: int) -> int | None:
        """Returns the address of so many bytes; None if there are none in one piece."""
        fitting = [(end - begin, begin) for begin, end in self._holes if end - begin >= nbytes]
        if not fitting:
            return None
        length, begin = min(fitting)
        at = bisect_left(self._holes, (begin, 0))
        self._holes[at : at + 1] = [(begin + nbytes, begin + length)] if length > nbytes else []
        self.used += nbytes
        return begin

    def free(self, begin: int, nbytes: int) -> None:
        """Takes a piece back, or part of one."""
        if not nbytes:
            return
        self.used -= nbytes
        end, first = begin + nbytes, bisect_left(self._holes, (begin, 0))
        last = first
        if last < len(self._holes) and self._holes[last][0] == end:
            end, last = self._holes[last][1], last + 1
        if first and self._holes[first - 1][1] == begin:
            begin, first = self._holes[first - 1][0], first - 1
        self._holes[first:last] = [(begin, end)]
