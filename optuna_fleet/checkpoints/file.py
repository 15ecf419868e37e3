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

FORMAT_VERSION = 5

_MAGIC = b"OptFleet"
# Magic, version, epoch, payload bytes, trial, digest of the study's name, sha256.
_HEADER = struct.Struct("<8sIIQI32s32s")
_KNOWN = struct.Struct("<II32s")  # what the sha256 covers besides the payload
_BLOCK_BYTES = 1 << 20


class CheckpointError(FleetError):
    """A checkpoint that can't be made, written or read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Whose a checkpoint is: a trial's, by its number, of a study, by its name."""

    study: str
    trial: int

    @property
    def study_digest(self) -> bytes:
        """SHA-256 of the study's name."""
        return hashlib.sha256(self.study.encode()).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What is known of a checkpoint without reading its payload."""

    epoch: int  # to go on with, counted from 0
    trial: int
    study_digest: bytes  # SHA-256 of the study's name
    digest: bytes  # SHA-256 of the payload and of the above


def write(file: IO[bytes], payload: memoryview, *, owner: Owner, epoch: int) -> None:
    """Write a checkpoint into an empty file."""
    digest = hashlib.sha256(payload)
    digest.update(_KNOWN.pack(epoch, owner.trial, owner.study_digest))
    about = FORMAT_VERSION, epoch, payload.nbytes, owner.trial, owner.study_digest
    file.write(_HEADER.pack(_MAGIC, *about, digest.digest()))
    file.write(payload)


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
    header = _header(path, owner, data[: _HEADER.size], len(data))
    payload = memoryview(data)[_HEADER.size :]
    _compare(path, header, hashlib.sha256(payload))
    return payload


def inspect(path: str | os.PathLike[str], owner: Owner | None, *, verify: bool) -> Header:
    """Read a checkpoint's header; with `verify`, the payload too, block by block.

    Raises:
        CheckpointError: What is wrong with it.
    """
    path = Path(path)
    with readable(path), Store(path.parent).read(path.name) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        header = _header(path, owner, file.read(_HEADER.size), size)
        digest = hashlib.sha256()
        while verify and (block := file.read(_BLOCK_BYTES)):
            digest.update(block)
    if verify:
        _compare(path, header, digest)
    return header


ADVICE = "the trial goes on from its checkpoint before, or from its first epoch"


def _header(
    path: str | os.PathLike[str], owner: Owner | None, start: bytes | bytearray, size: int
) -> Header:
    if size < _HEADER.size:
        raise CheckpointError(f"The checkpoint {path} is truncated: {ADVICE}.")
    magic, version, epoch, num_bytes, trial, study_digest, digest = _HEADER.unpack(start)
    if magic != _MAGIC:
        raise CheckpointError(f"The file {path} is no checkpoint of optuna-fleet: {ADVICE}.")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"The checkpoint {path} has format version {version}, but must have {FORMAT_VERSION}: "
            f"use the version of optuna-fleet that wrote it, or {ADVICE}."
        )
    if size - _HEADER.size != num_bytes:
        raise CheckpointError(
            f"The checkpoint {path} is truncated or torn ({size - _HEADER.size} of {num_bytes} "
            f"bytes): {ADVICE}."
        )
    if owner is not None and (trial, study_digest) != (owner.trial, owner.study_digest):
        whose = f"trial {trial}" if study_digest == owner.study_digest else "another study"
        raise CheckpointError(
            f"The checkpoint {path} is of {whose}, not of trial {owner.trial} of study "
            f"{owner.study!r}: {ADVICE}."
        )
    return Header(epoch=epoch, trial=trial, study_digest=study_digest, digest=digest)


def _compare(path: str | os.PathLike[str], header: Header, payload: hashlib._Hash) -> None:
    payload.update(_KNOWN.pack(header.epoch, header.trial, header.study_digest))
    if payload.digest() != header.digest:
        raise CheckpointError(f"The checkpoint {path} is corrupt (checksum differs): {ADVICE}.")
