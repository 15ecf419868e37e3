"""How a checkpoint travels between a trainer and the driver's folder, where no disk is shared.

Likewise the data sets, to agents on other machines. On a connection of its own to the driver's
listener, which `OpenTransfer` begins. A file goes as `Piece`s and a `Whole`; whoever has it
verifies that. Neither end keeps more than a piece of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Any

from optuna_fleet.checkpoints.file import CheckpointError
from optuna_fleet.wire.channel import Channel

PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTransfer:
    """First message: this connection is neither an agent's nor a trainer's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """A file follows, of this name, for the folder of this study; `Whole` or `Refused` answers."""

    study: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Get:
    """Answer with a file, or with `Refused`."""

    study: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GetDataSets:
    """Likewise, with the file that has the data sets of the fleet in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A piece of a file."""

    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """The end of a file, and what it is as a whole."""

    num_bytes: int
    sha256: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """In the place of a file, or of its rest; `problem` is a sentence."""

    problem: str


def send_file(channel: Channel, file: IO[bytes], *, stop: Callable[[], bool]) -> None:
    """Send a file from its beginning; `stop` is asked before each piece."""
    num_bytes, digest = 0, hashlib.sha256()
    file.seek(0)
    while not stop() and (data := file.read(PIECE_BYTES)):
        channel.send(Piece(data=data))
        num_bytes += len(data)
        digest.update(data)
    channel.send(Whole(num_bytes=num_bytes, sha256=digest.digest()))


def receive_file(receive: Callable[[], Any], write: Callable[[bytes], Any]) -> Whole:
    """Receive a file, and verify it.

    Raises:
        CheckpointError: It is refused, or not what was sent.
        EOFError: The other end is gone, and so are `OSError`s of `receive`.
    """
    num_bytes, digest = 0, hashlib.sha256()
    while isinstance(message := receive(), Piece):
        write(message.data)
        num_bytes += len(message.data)
        digest.update(message.data)
    if isinstance(message, Refused):
        raise CheckpointError(message.problem)
    whole = Whole(num_bytes=num_bytes, sha256=digest.digest())
    if message != whole:
        raise CheckpointError("A file did not arrive as it was sent.")
    return whole
