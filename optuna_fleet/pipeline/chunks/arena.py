"""The arena: the memory in which all samples of a node lie, and its continuation on a disk.

The agent maps one memory file, shared and writable, and seals it against any further writable
mapping. Preprocessors are forked from it and write samples in place; all others get descriptors
that only read. On the disk it is a file without a name. One range of addresses goes through both.

Memory is handed over page by page, and with pages of 4 KiB that costs as much as reading them.
So preprocessors have it made of huge pages where the kernel gives them (MADV_COLLAPSE: Linux 6.1,
whatever `shmem_enabled` says). Where they take long to get (memory is scattered, or has to come
from a host first), few pieces have them.
"""

from __future__ import annotations

import errno
import fcntl
import math
import mmap
import os
import time
from contextlib import suppress
from dataclasses import dataclass

from optuna_fleet.pipeline.chunks.memory_files import HUGE_PAGE, address_of, madvise, map_aligned

PATIENCE_S = 2.5e-3
"""For a huge page, in time of this thread; clearing one takes 0.1 ms, or some ms if it comes from
a host. But then each reader saves 0.2 ms when it first maps it, and 0.07 ms whenever it reads."""

_LONGEST_PAUSE = 32
"""Huge pages not asked for after one that took long to come, and the next, and the next..."""

_MADV_COLLAPSE = 25
_SEAL_FUTURE_WRITE = 0x0010  # Linux 5.1
_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, slots=True, kw_only=True)
class Extents:
    """Where the parts of an arena are: memory from 0 on, the disk from ``disk_begin`` on."""

    memory_bytes: int
    disk_begin: int
    disk_bytes: int

    @property
    def num_files(self) -> int:
        """How many files that are: one, or two."""
        return 2 if self.disk_bytes else 1

    def is_on_disk(self, address: int) -> bool:
        """Returns whether an address is one of the disk."""
        return address >= self.disk_begin


class HugePages:
    """Whether to ask for a huge page; seldom, where they are slow to come."""

    def __init__(self) -> None:
        self._pause = 0
        self._left = 0

    def wanted(self) -> bool:
        """Says whether to try; called once for each."""
        if self._left:
            self._left -= 1
            return False
        return True

    def took(self, seconds: float) -> None:
        """Learns how long it took."""
        is_slow = seconds > PATIENCE_S
        self._pause = min(2 * self._pause or 1, _LONGEST_PAUSE) if is_slow else 0
        self._left = self._pause


_NO_ROOM = (
    "{} bytes for preprocessed data can't be had ({}): give SharedPipeline a smaller "
    "memory_bytes, or allow larger files and more memory (`ulimit -f`, `ulimit -v`)"
)


class Arena:
    """The side of those who write: the agent, and the preprocessors that are forked from it.

    Memory and disk are taken when they are first written to; the folder's file system must know
    ``O_TMPFILE``.

    Attributes:
        extents: Where its parts are.
        descriptors: Of the memory and, if there is one, of the file on the disk; for reading only.
    """

    def __init__(self, memory_bytes: int, disk_bytes: int = 0, folder: str | None = None) -> None:
        self.extents = Extents(
            memory_bytes=memory_bytes,
            disk_begin=-(-memory_bytes // HUGE_PAGE) * HUGE_PAGE,
            disk_bytes=disk_bytes,
        )
        self._huge_pages = HugePages()
        self._collapsed: set[int] = set()
        self._disk = -1
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        memory = os.memfd_create("optuna-fleet-arena", flags)
        try:
            try:
                os.ftruncate(memory, memory_bytes)
                given = memory, memory_bytes
                self._outer, self._shift = map_aligned(given, flags=mmap.MAP_SHARED)
            except OSError as error:
                raise OSError(error.errno, _NO_ROOM.format(memory_bytes, error.strerror)) from None
            self._address = address_of(self._outer) + self._shift
            with suppress(OSError):
                fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS | _SEAL_FUTURE_WRITE)
            self.descriptors = [_for_reading(memory)]
        finally:
            os.close(memory)
        if disk_bytes:
            assert folder is not None
            self._disk = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            os.ftruncate(self._disk, disk_bytes)
            self.descriptors.append(_for_reading(self._disk))

    def writable(self, address: int, nbytes: int) -> memoryview:
        """Returns a piece to write into; what is for the disk goes there by `commit`."""
        if self.extents.is_on_disk(address):
            return memoryview(mmap.mmap(-1, nbytes))
        self._have_huge_pages(address, nbytes)
        begin = self._shift + address
        return memoryview(self._outer)[begin : begin + nbytes]

    def commit(self, address: int, written: memoryview) -> None:
        """Call when a piece, or its beginning, is written.

        Raises:
            OSError: The disk is full, read-only or gone.
        """
        if self.extents.is_on_disk(address):
            place = address - self.extents.disk_begin
            os.posix_fallocate(self._disk, place, max(1, written.nbytes))
            done = 0
            while done < written.nbytes:
                done += os.pwrite(self._disk, written[done:], place + done)

    def readable(self) -> memoryview:
        """Returns all of the memory, mapped so that nothing can be written there by mistake."""
        files = (self.descriptors[0], self.extents.memory_bytes)
        memory, shift = map_aligned(files, flags=mmap.MAP_SHARED, writable=False)
        return memoryview(memory)[shift : shift + self.extents.memory_bytes].toreadonly()

    def close(self) -> None:
        """Lets go of it, also in a child that does not preprocess; readers keep what they map."""
        self._outer.close()
        for descriptor in [*self.descriptors, *([self._disk] if self._disk >= 0 else [])]:
            os.close(descriptor)

    def _have_huge_pages(self, address: int, nbytes: int) -> None:
        """Has the kernel give this process and the readers huge pages where the piece lies."""
        last = min(address + nbytes, self.extents.memory_bytes // HUGE_PAGE * HUGE_PAGE)
        for number in range(address // HUGE_PAGE, -(-last // HUGE_PAGE)):
            if number in self._collapsed or not self._huge_pages.wanted():
                continue
            self._collapsed.add(number)
            begin = number * HUGE_PAGE
            self._outer[self._shift + max(begin, address)] = 0  # a hole is not collapsed
            started = time.thread_time()
            error = madvise(self._address + begin, HUGE_PAGE, _MADV_COLLAPSE)
            self._huge_pages.took(math.inf if error else time.thread_time() - started)
            if error == errno.EINVAL:  # there are none on this machine
                self._collapsed.update(range(self.extents.memory_bytes // HUGE_PAGE))


def _for_reading(file: int) -> int:
    return os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
