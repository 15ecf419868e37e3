"""Memory files and their mappings, at addresses where huge pages can be used as they are."""

from __future__ import annotations

import ctypes
import mmap
import os

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


def map_privately(fd: int) -> memoryview:
    """Returns the bytes of a file, mapped copy-on-write; they outlive the descriptor."""
    nbytes = os.fstat(fd).st_size
    memory, shift = map_aligned((fd, nbytes), flags=mmap.MAP_PRIVATE)
    return memoryview(memory)[shift : shift + nbytes]


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
