"""The file of a checkpoint: written whole or not at all, verified when read. Without torch."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from optuna_fleet.checkpoints.store import Store
from optuna_fleet.exceptions import FleetError

FORMAT_VERSION = 6
ADVICE = "the trial goes on from its checkpoint before, or from its first epoch"

_MAGIC = b"OptFleet"
_HEADER = struct.Struct("<8sI32s")  # magic, version, SHA-256 of the payload and its owner


class CheckpointError(FleetError):
    """A checkpoint that can't be made, written or read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Whose a checkpoint is: a trial's, by its number, of a study, by its name."""

    study: str
    trial: int


def write(file: IO[bytes], payload: memoryview, owner: Owner) -> None:
    """Write a checkpoint into an empty file."""
    file.write(_HEADER.pack(_MAGIC, FORMAT_VERSION, _digest(payload, owner)))
    file.write(payload)


def _digest(payload: memoryview, owner: Owner) -> bytes:
    digest = hashlib.sha256(payload)
    digest.update(f"{owner.trial} {owner.study}".encode())
    return digest.digest()


def written(path: str | os.PathLike[str]) -> AbstractContextManager[None]:
    """Say of an `OSError` in it, by a `CheckpointError`, that the checkpoint can't be written."""
    advice = "check that its folder exists, may be written to and has space."
    return _explaining(f"The checkpoint {path} can't be written", advice)


def readable(path: str | os.PathLike[str]) -> AbstractContextManager[None]:
    """Likewise that it can't be read."""
    advice = "check the folder, or start the trial again from its first epoch."
    return _explaining(f"The checkpoint {path} can't be read", advice)


@contextmanager
def _explaining(problem: str, advice: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{problem} ({error}): {advice}") from error


def contents(path: str | os.PathLike[str]) -> bytes:
    """All that is in a file."""
    path = Path(path)
    with readable(path), Store(path.parent).read(path.name) as file:
        return file.read()


def verified(path: str | os.PathLike[str], data: bytes | bytearray, owner: Owner) -> memoryview:
    """The payload of the checkpoint at `path`, which has `data` in it.

    Raises:
        CheckpointError: It is torn, altered, of another format or owner.
    """
    start, payload = data[: _HEADER.size], memoryview(data)[_HEADER.size :]
    magic, version, digest = _HEADER.unpack(start.ljust(_HEADER.size, b"\0"))
    if magic == _MAGIC and version != FORMAT_VERSION:
        raise CheckpointError(
            f"The checkpoint {path} has format version {version}, but must have {FORMAT_VERSION}: "
            f"use the version of optuna-fleet that wrote it, or {ADVICE}."
        )
    if magic != _MAGIC or digest != _digest(payload, owner):
        raise CheckpointError(
            f"The checkpoint {path} is corrupt, or not of trial {owner.trial} of study "
            f"{owner.study!r}: {ADVICE}."
        )
    return payload
