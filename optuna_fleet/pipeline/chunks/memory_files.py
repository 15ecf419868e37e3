"""Memory files that nobody can change any more, and private mappings of them.

Memory is handed over page by page, and with pages of 4 KiB that costs as much as reading them.
So files of some size are made of huge pages where the kernel gives them (MADV_COLLAPSE: Linux 6.1,
whatever `shmem_enabled` says), and mapped at addresses where those can be used as they are. Where
they take long to get (memory is scattered, or has to come from a host first), few files have them.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import math
import mmap
import os
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

HUGE_PAGE = 2 << 20

PATIENCE_S, LONG_PATIENCE_S = 0.4e-3, 2.5e-3
"""For a huge page, in time of this thread; clearing one takes 0.1 ms, or 2 ms if it comes from a
host. Each reading of it then takes 0.05 ms less than that of small pages. So the long patience is
for files that are read over and over.
"""

_LONGEST_PAUSE = 32
"""Files without huge pages after one that had to wait for them, and the next, and the next..."""

MOST_WASTE = 1 / 8
"""Of a file: its last huge page may have so much behind its end."""

_MADV_POPULATE_READ = 22
_MADV_COLLAPSE = 25
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_SMALL = 4096  # bytes: below it is cheaper to join pieces than to have the kernel gather them
_MAX_PIECES = os.sysconf("SC_IOV_MAX")
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


class HugePages:
    """Whether the next file is to have huge pages; seldom, where they are slow to come.

    Args:
        patience_s: For each of them.
    """

    def __init__(self, patience_s: float) -> None:
        self.exist = True
        self._patience_s = patience_s
        self._pause = 0
        self._left = 0

    def wanted(self) -> bool:
        """Says whether to try; called once for each file."""
        if self._left:
            self._left -= 1
            return False
        return self.exist

    def took(self, seconds: float, number: int) -> None:
        """Learns how long so many of them took."""
        is_slow = seconds > self._patience_s * number
        self._pause = min(2 * self._pause or 1, _LONGEST_PAUSE) if is_slow else 0
        self._left = self._pause


_huge_pages = {False: HugePages(PATIENCE_S), True: HugePages(LONG_PATIENCE_S)}


def sealed_file(nbytes: int, fill: Callable[[mmap.mmap], None]) -> int:
    """Makes an immutable memory file: no trainer can change what the others read.

    Args:
        nbytes: Its size.
        fill: Writes its content into the mapped file.

    Returns:
        The file's descriptor, which the caller must close.
    """

    def write(fd: int) -> None:
        os.ftruncate(fd, nbytes)
        memory = mmap.mmap(fd, nbytes)
        fill(memory)
        memory.close()  # a file that is mapped for writing can't be sealed

    return _sealed(nbytes, write)


def sealed_file_of(pieces: Sequence[Any], *, read_often: bool = False) -> int:
    """Makes an immutable memory file of these buffers of bytes, one after another.

    Half the price of ``sealed_file``: pages are neither cleared nor mapped before they are filled.
    """
    nbytes = sum(memoryview(piece).nbytes for piece in pieces)
    return _sealed(nbytes, lambda fd: _write_all(fd, pieces), read_often=read_often)


def map_privately(fd: int) -> memoryview:
    """Returns the bytes of a file, mapped copy-on-write; they outlive the descriptor."""
    nbytes = os.fstat(fd).st_size
    memory, shift = _map_aligned(fd, nbytes, mmap.MAP_PRIVATE)
    return memoryview(memory)[shift : shift + nbytes]


def populate(address: int, nbytes: int) -> None:
    """Has the kernel map these bytes of a file at once, a third cheaper than one by one."""
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    _libc.madvise(begin, address + nbytes - begin, _MADV_POPULATE_READ)  # or not: Linux < 5.14


def _sealed(nbytes: int, write: Callable[[int], None], *, read_often: bool = False) -> int:
    fd = os.memfd_create("optuna-fleet-chunk", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        _take_huge_pages(fd, nbytes, _huge_pages[read_often])
        write(fd)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _take_huge_pages(fd: int, nbytes: int, huge_pages: HugePages) -> None:
    """Gives an empty file huge pages, if the machine has them; it may become a little longer."""
    huge_bytes = _in_huge_pages(nbytes)
    if not huge_bytes or not huge_pages.wanted():
        return
    os.ftruncate(fd, huge_bytes)
    for offset in range(0, huge_bytes, HUGE_PAGE):
        os.pwrite(fd, b"\0", offset)  # a hole is not collapsed
    memory, shift = _map_aligned(fd, huge_bytes, mmap.MAP_SHARED)
    began = time.thread_time()
    try:
        memory.madvise(_MADV_COLLAPSE, shift, huge_bytes)
        huge_pages.took(time.thread_time() - began, huge_bytes // HUGE_PAGE)
    except OSError as error:
        huge_pages.exist = huge_pages.exist and error.errno != errno.EINVAL
        huge_pages.took(math.inf, 1)  # none free now
        os.ftruncate(fd, nbytes)
    memory.close()


def _in_huge_pages(nbytes: int) -> int:
    """Bytes of a file to put into huge pages: its end too, unless much would be wasted."""
    whole, rest = divmod(nbytes, HUGE_PAGE)
    is_worth_it = rest and HUGE_PAGE - rest <= MOST_WASTE * nbytes
    return (whole + bool(is_worth_it)) * HUGE_PAGE


def file_bytes(nbytes: int) -> int:
    """Returns the most that a file with so many bytes of content takes."""
    return max(nbytes, _in_huge_pages(nbytes))


def _map_aligned(fd: int, nbytes: int, flags: int) -> tuple[mmap.mmap, int]:
    """Maps a file at a multiple of the huge page.

    Returns:
        A larger mapping that has the file in it, and where it begins there.
    """
    room = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    outer = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=room)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(outer))
    shift = -begin % HUGE_PAGE
    access = mmap.PROT_READ | mmap.PROT_WRITE
    where = begin + shift
    if nbytes and _libc.mmap(where, nbytes, access, flags | _MAP_FIXED, fd, 0) != where:
        error = ctypes.get_errno()
        raise OSError(error, f"{nbytes} bytes of a chunk could not be mapped")
    return outer, shift


def _write_all(fd: int, pieces: Iterable[Any]) -> None:
    rest = (view for view in (memoryview(piece).cast("B") for piece in pieces) if view.nbytes)
    while batch := list(islice(rest, _MAX_PIECES)):
        if sum(piece.nbytes for piece in batch) < len(batch) * _SMALL:
            batch = [memoryview(b"".join(batch))]
        while batch:
            written = os.writev(fd, batch)
            while batch and written >= batch[0].nbytes:
                written -= batch.pop(0).nbytes
            if batch:  # cut short, by a signal or the kernel's limit of 2 GiB
                batch[0] = batch[0][written:]
