"""Chunks in files of the spill folder: without a name, so that nothing can be left behind."""

from __future__ import annotations

import os


def to_disk(fd: int, folder: str) -> int:
    """Copies a chunk's memory file into the folder.

    Args:
        fd: The memory file; closed in any case.
        folder: On a disk whose file system knows ``O_TMPFILE``.

    Returns:
        A descriptor for reading only, which the caller must close.

    Raises:
        OSError: The disk is full, read-only or gone.
    """
    try:
        nbytes = os.fstat(fd).st_size
        file = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, nbytes)  # a full disk is noticed now, not at a page fault
            sent = 0
            while sent < nbytes:
                sent += os.sendfile(file, fd, sent, nbytes - sent)
            # Trainers may not write what others read.
            return os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(file)
    finally:
        os.close(fd)
