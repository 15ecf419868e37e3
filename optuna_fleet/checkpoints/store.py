"""Where checkpoints are kept: the one place that knows that these are files in a folder.

Another kind of store is another module of this form. It raises `OSError`s.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.files import replacing

_LOCK = "lock"
_TOKEN = "token"


@dataclass(frozen=True, slots=True)
class Store:
    """What is kept in a folder, by name."""

    root: Path

    def write(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """Write it whole or not at all, in the place of what has that name."""
        return replacing(self.root / name)

    def read(self, name: str) -> IO[bytes]:
        """Open it."""
        return open(self.root / name, "rb")

    def list(self) -> list[str]:
        """What there is, whole or not, and the stores that are in it."""
        return os.listdir(self.root)

    def size(self, name: str) -> int:
        """In bytes."""
        return os.stat(self.root / name).st_size

    def remove(self, name: str) -> None:
        """Remove it."""
        os.unlink(self.root / name)

    def rename(self, name: str, new: str) -> None:
        """Call it otherwise, in the place of what has that name."""
        os.replace(self.root / name, self.root / new)

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Hold it for this process alone; if that dies, the kernel lets go of it.

        Raises:
            FleetConfigError: Another driver holds it, or it can't be written to.
        """
        try:
            descriptor = os.open(self.root / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise FleetConfigError(
                f"The checkpoint folder {self.root} can't be used ({error.strerror}): check that "
                "it may be written to and has space."
            ) from error
        with os.fdopen(descriptor, "r+b"):
            _lock(descriptor, self.root)
            try:
                yield
            finally:  # not only by closing it: a process that the user forked has it open too
                fcntl.flock(descriptor, fcntl.LOCK_UN)


def _lock(descriptor: int, root: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 1000, 0).decode(errors="replace") or "another process"
        raise FleetConfigError(
            f"The checkpoint folder {root} is in use by {holder}: give each driver that runs at "
            "the same time one of its own, or wait until that one has ended."
        ) from None
    except OSError as error:
        raise FleetConfigError(
            f"The checkpoint folder {root} can't be locked ({error.strerror}): use a folder on a "
            "file system that has locks."
        ) from error
    with contextlib.suppress(OSError):  # a full disk; it only serves the message above
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)


def mark(root: Path) -> str:
    """Leave a token in a driver's folder, by which others know whether they see the same one."""
    token = secrets.token_hex(16)
    with contextlib.suppress(OSError), replacing(root / _TOKEN) as file:  # else none sees it
        file.write(token.encode())
    return token


def is_shared(root: Path, token: str) -> bool:
    """Whether the folder at this path is, from here too, the one that has this token."""
    try:
        return (root / _TOKEN).read_text() == token and os.access(root, os.W_OK)
    except (OSError, ValueError):
        return False


def private_folder() -> Path:
    """Make a temporary folder for checkpoints that end with the executor."""
    try:
        return Path(tempfile.mkdtemp(prefix="optuna-fleet-"))
    except OSError as error:
        raise FleetConfigError(
            f"No temporary folder for checkpoints can be made ({error}): set the environment "
            "variable TMPDIR to a folder that can be written to, or one to FleetExecutor as "
            "`checkpoints`."
        ) from error


def remove_all(root: Path | str) -> None:
    """Remove a temporary folder with all that is in it, if there is one, and if it can be."""
    shutil.rmtree(root, ignore_errors=True)
