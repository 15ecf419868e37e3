"""The arena as a trainer maps it: once, and copy-on-write.

What it reads there are the very bytes that preprocessors wrote, and what it writes is its own. A
piece that is given back will be written anew, so before that

- pages that were written to are thrown away: the next reading is of what is there then;
- where the user keeps a view of it, all its pages are made the process' own first. The addresses
  stay taken until that view is gone, and other chunks that come to lie there are copied.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
import struct
import weakref
from contextlib import suppress
from ctypes import addressof, c_uint64

import numpy as np

from optuna_fleet.pipeline.chunks.arena import address_of, madvise, map_aligned
from optuna_fleet.pipeline.chunks.layout import Bytes

_PAGE = mmap.PAGESIZE
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # Linux 5.14
_GRANULE = 64 << 10  # bytes: so exactly is noted what is mapped

_PAGEMAP_SCAN = 0xC0606610  # Linux 6.7
_SCAN = struct.Struct("12Q")
_IS_FILE, _IS_PRESENT, _IS_SWAPPED = 1 << 2, 1 << 3, 1 << 4
_NUM_RANGES = 64

_mappings: weakref.WeakSet[Mapping] = weakref.WeakSet()


class Mapping:
    """An arena, mapped by a process that reads; it closes the descriptors in the end."""

    def __init__(self, nbytes: int, descriptor: int) -> None:
        self._descriptors = [descriptor]
        self._closing = weakref.finalize(self, _close, self._descriptors)
        self._closing.atexit = False
        try:
            self._outer, shift = map_aligned((descriptor, nbytes), flags=mmap.MAP_PRIVATE)
        except OSError:  # limits on address space (ulimit -v, strict overcommit): copies then
            self._memory = None
            return
        self._base = address_of(self._outer) + shift
        self._memory = memoryview(self._outer)[shift:]
        self._mapped = bytearray(-(-nbytes // _GRANULE))
        self._lent: weakref.WeakValueDictionary[int, Bytes] = weakref.WeakValueDictionary()
        self._kept: dict[int, int] = {}  # address and length of pieces that are the process' own
        self._faults: dict[int, int] = {}  # address of pieces and the page faults before
        with suppress(OSError):
            self._pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
            self._descriptors.append(self._pagemap)
        self._ranges = (c_uint64 * (3 * _NUM_RANGES))()
        _mappings.add(self)

    def close(self) -> None:
        """Closes the descriptors; the memory stays mapped as long as somebody has a view of it."""
        self._closing()

    def copy(self, address: int, nbytes: int) -> Bytes:
        """Returns a copy of a piece, which can be given back at once."""
        found = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        done = 0
        while done < nbytes:
            done += os.preadv(self._descriptors[0], [found[done:].data], address + done)
        return found

    def lend(self, address: int, nbytes: int) -> Bytes | None:
        """Returns a piece of the arena; None if its addresses are taken.

        That is by a view of what was there before, or by another reading of the same: whoever
        writes into one must not change the other.
        """
        if self._memory is None or address in self._lent or self._is_taken(address, nbytes):
            return None
        self._map(address, nbytes)
        # Of a memoryview: an array's views would keep its base alive, and not itself.
        piece: Bytes = np.frombuffer(self._memory[address : address + nbytes], np.uint8)
        self._lent[address] = piece
        self._faults[address] = _num_faults()
        return piece

    def clean(self, address: int, nbytes: int) -> None:
        """Throws away what the process has written there; nobody may have a view of it."""
        if address in self._kept:
            return  # it was done when the last view went
        faults = self._faults.pop(address, 0)
        if faults and faults == _num_faults():
            return  # who writes to a page first has a page fault
        begin = self._base + address
        for start, stop in self._own_pages(begin, begin + nbytes):
            madvise(start, stop - start, mmap.MADV_DONTNEED)
            granules = _granules(start - self._base, stop - start)
            self._mapped[granules] = bytes(granules.stop - granules.start)

    def keep(self, address: int, piece: Bytes) -> None:
        """Makes a piece the process' own, for as long as there is a view of it."""
        if address in self._kept:
            return
        nbytes = piece.nbytes
        if madvise(self._base + address, nbytes, _MADV_POPULATE_WRITE):
            piece[::_PAGE] |= 0  # an assignment to itself NumPy leaves out
        self._kept[address] = nbytes
        self._faults.pop(address, None)
        weakref.finalize(piece, self._forget, address).atexit = False

    def keep_all(self) -> None:
        """Makes everything that is lent the process' own: two processes are about to share it."""
        for address, piece in list(self._lent.items()):
            self.keep(address, piece)

    def _forget(self, address: int) -> None:
        self.clean(address, self._kept.pop(address))

    def _is_taken(self, address: int, nbytes: int) -> bool:
        """Whether any of it is in a kept piece; any of these may be forgotten meanwhile."""
        end = address + nbytes
        return any(begin < end and address < begin + n for begin, n in tuple(self._kept.items()))

    def _map(self, address: int, nbytes: int) -> None:
        """Has the kernel map a piece at once, which costs a third of doing so page by page."""
        granules = _granules(address, nbytes)
        if not all(self._mapped[granules]):
            self._mapped[granules] = bytes([1]) * (granules.stop - granules.start)
            madvise(self._base + address, nbytes, _MADV_POPULATE_READ)

    def _own_pages(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Ranges of pages that are copies of what is in the file; too many, where in doubt."""
        end = -(-end // _PAGE) * _PAGE
        mask = _IS_FILE | _IS_PRESENT | _IS_SWAPPED
        ranges = addressof(self._ranges)
        request = bytearray(
            _SCAN.pack(
                *(_SCAN.size, 0, begin, end, 0, ranges, _NUM_RANGES, 0),
                *(_IS_FILE, _IS_FILE, _IS_PRESENT | _IS_SWAPPED, mask),
            )
        )
        try:
            found = fcntl.ioctl(self._pagemap, _PAGEMAP_SCAN, request)
        except (OSError, AttributeError):
            return [(begin, end)]
        if found == _NUM_RANGES:
            return [(begin, end)]
        return [(self._ranges[3 * i], self._ranges[3 * i + 1]) for i in range(found)]


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
    descriptors.clear()


def _num_faults() -> int:
    """The page faults of this process so far, in all threads; 0 where they are not counted."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt + usage.ru_majflt


def _granules(address: int, nbytes: int) -> slice:
    return slice(address // _GRANULE, (address + nbytes - 1) // _GRANULE + 1)


def _before_fork() -> None:
    for mapping in list(_mappings):
        mapping.keep_all()


os.register_at_fork(before=_before_fork)
