"""The arena: the file in which all samples of a node lie, in memory or in a folder of the user's.

The agent maps it, shared and writable; preprocessors are forked from it and write samples in
place. All others get a descriptor that only reads. In memory it is sealed against any further
writable mapping; on a disk it has no name, and of what was written the kernel keeps in memory
what is read.

Memory is handed over page by page, and with pages of 4 KiB that costs as much as reading them.
So preprocessors have it made of huge pages where the kernel gives them (MADV_COLLAPSE: Linux 6.1,
whatever `shmem_enabled` says). Where they take long to get (memory is scattered, or has to come
from a host first), few pieces have them.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import time
from contextlib import suppress

HUGE_PAGE = 2 << 20

_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


def map_aligned(file: tuple[int, int], *, flags: int) -> tuple[mmap.mmap, int]:
    """Maps a file of this descriptor and size, from a multiple of the huge page on.

    Returns a larger mapping that has it in it, and where it begins there.

    Raises:
        OSError: The process may not map so much.
    """
    fd, nbytes = file
    total = -(-nbytes // HUGE_PAGE) * HUGE_PAGE
    room = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    outer = mmap.mmap(-1, total + HUGE_PAGE, flags=room)
    address = address_of(outer)
    shift = -address % HUGE_PAGE
    access, how = mmap.PROT_READ | mmap.PROT_WRITE, flags | _MAP_FIXED | _MAP_NORESERVE
    where = address + shift
    if nbytes and _libc.mmap(where, nbytes, access, how, fd, 0) != where:
        error = ctypes.get_errno()
        raise OSError(error, f"{nbytes} bytes could not be mapped: {os.strerror(error)}")
    return outer, shift


def address_of(memory: mmap.mmap) -> int:
    """Returns where a mapping begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def madvise(address: int, nbytes: int, advice: int) -> int:
    """Gives advice on whole pages; returns 0 or the number of the error."""
    return ctypes.get_errno() if _libc.madvise(address, nbytes, advice) else 0


PATIENCE_S = 2.5e-3
"""For a huge page, in time of this thread; clearing one takes 0.1 ms, or some ms if it comes from
a host. But then each reader saves 0.2 ms when it first maps it, and 0.07 ms whenever it reads."""

_LONGEST_PAUSE = 32
"""Huge pages not asked for after one that took long to come, and the next, and the next..."""

_MADV_COLLAPSE = 25
_SEAL_FUTURE_WRITE = 0x0010  # Linux 5.1
_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


_NO_ROOM = (
    "{} bytes for preprocessed data can't be had{} ({}): give SharedPipeline a smaller "
    "memory_bytes, or allow larger files and more memory (`ulimit -f`, `ulimit -v`)"
)


class Arena:
    """The side of those who write: the agent, and the preprocessors that are forked from it.

    Memory is taken when it is first written to. A file in a ``folder`` has its whole size from the
    beginning: no disk is full later. The folder's file system must know ``O_TMPFILE``.

    Attributes:
        nbytes: Its size.
        descriptor: Of the file, for reading only.
    """

    def __init__(self, nbytes: int, folder: str | None = None) -> None:
        self.nbytes = nbytes
        self._collapsed: set[int] = set()
        self._pause = self._pause_left = 0  # huge pages that are not asked for
        file = _memory_file() if folder is None else _nameless_file(folder)
        try:
            try:
                os.ftruncate(file, nbytes)
                if folder is not None:
                    os.posix_fallocate(file, 0, nbytes)
                self._outer, self._shift = map_aligned((file, nbytes), flags=mmap.MAP_SHARED)
            except OSError as error:
                where = "" if folder is None else f" in the spill_dir {folder}"
                text = _NO_ROOM.format(nbytes, where, error.strerror)
                raise OSError(error.errno, text) from None
            self._address = address_of(self._outer) + self._shift
            with suppress(OSError):  # files on a disk have no seals
                fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS | _SEAL_FUTURE_WRITE)
            self.descriptor = os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(file)

    def writable(self, address: int, nbytes: int) -> memoryview:
        """Returns a piece to write into."""
        self._have_huge_pages(address, nbytes)
        return self._piece(address, nbytes)

    def readable(self, address: int, nbytes: int) -> memoryview:
        """Returns a piece in which nothing can be written by mistake."""
        return self._piece(address, nbytes).toreadonly()

    def close(self) -> None:
        """Lets go of it, also in a child that does not preprocess; readers keep what they map."""
        self._outer.close()
        os.close(self.descriptor)

    def _piece(self, address: int, nbytes: int) -> memoryview:
        begin = self._shift + address
        return memoryview(self._outer)[begin : begin + nbytes]

    def _have_huge_pages(self, address: int, nbytes: int) -> None:
        """Has the kernel give this process and the readers huge pages where the piece lies."""
        last = min(address + nbytes, self.nbytes // HUGE_PAGE * HUGE_PAGE)
        for number in range(address // HUGE_PAGE, -(-last // HUGE_PAGE)):
            if number in self._collapsed:
                continue
            if self._pause_left:
                self._pause_left -= 1
                continue
            self._collapsed.add(number)
            begin = number * HUGE_PAGE
            self._outer[self._shift + max(begin, address)] = 0  # a hole is not collapsed
            started = time.thread_time()
            error = madvise(self._address + begin, HUGE_PAGE, _MADV_COLLAPSE)
            is_slow = bool(error) or time.thread_time() - started > PATIENCE_S
            self._pause = min(2 * self._pause or 1, _LONGEST_PAUSE) if is_slow else 0
            self._pause_left = self._pause
            if error == errno.EINVAL:  # there are none on this machine
                self._collapsed.update(range(self.nbytes // HUGE_PAGE))


def _memory_file() -> int:
    return os.memfd_create("optuna-fleet-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def _nameless_file(folder: str) -> int:
    return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
