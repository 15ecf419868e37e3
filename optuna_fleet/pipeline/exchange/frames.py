"""What travels between nodes: fixed-size frames of plain numbers, and bytes announced by one.

Frames are authenticated with the sweep's secret before their numbers are used; bytes are checked
against the keyed digest in their frame before anyone looks into them. Nothing is unpickled here.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass, replace
from enum import IntEnum
from hashlib import blake2b
from typing import TYPE_CHECKING

from optuna_fleet.exceptions import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Buffer  # type: ignore[attr-defined]

NUM_NUMBERS = 8
DIGEST_BYTES = 32
_NUMBERS = struct.Struct(f"<{2 + NUM_NUMBERS}q")
FRAME_BYTES = _NUMBERS.size + 2 * DIGEST_BYTES


class Kind(IntEnum):
    """What a frame asks for, or answers."""

    CHUNK = 1
    SIZE = 2
    PLAN = 3
    PROBE = 4


class Status(IntEnum):
    """How a request was answered; 0 is a request."""

    REQUEST = 0
    GIVEN = 1
    REFUSED = 2
    OUTGREW = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One request or answer.

    Attributes:
        kind: What it is about.
        status: Request or kind of answer.
        numbers: Its arguments.
        digest: Of the bytes that follow, if it announces any.
    """

    kind: Kind
    status: Status = Status.REQUEST
    numbers: tuple[int, ...] = ()
    digest: bytes = bytes(DIGEST_BYTES)

    def announcing(self, digest: bytes) -> Frame:
        """Returns the frame for bytes of this digest."""
        return replace(self, digest=digest)


class Sealer:
    """Packs frames for, and unpacks those of, nodes that know the secret.

    Args:
        secret: The sweep's.
        about: What nodes must have in common besides.
    """

    def __init__(self, secret: bytes, about: bytes = b"") -> None:
        self._key = blake2b(about, key=blake2b(secret).digest(), person=b"fleet exchange").digest()

    def store_prefix(self) -> str:
        """Returns the name under which nodes with this secret meet."""
        return blake2b(b"meeting point", key=self._key, digest_size=16).hexdigest()

    def digest(self, body: Buffer) -> bytes:
        """Returns the keyed digest of bytes to be sent."""
        return blake2b(body, key=self._key, digest_size=DIGEST_BYTES, person=b"body").digest()

    def pack(self, frame: Frame) -> bytes:
        """Returns the frame's bytes."""
        numbers = frame.numbers + (0,) * (NUM_NUMBERS - len(frame.numbers))
        content = _NUMBERS.pack(frame.kind, frame.status, *numbers) + frame.digest
        return content + self._proof(content)

    def unpack(self, data: bytes) -> Frame:
        """Returns the frame in these bytes.

        Raises:
            ProtocolError: Its sender does not know the secret.
        """
        content, proof = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
        if not hmac.compare_digest(proof, self._proof(content)):
            raise ProtocolError("it does not know the sweep's secret, or speaks another version")
        kind, status, *numbers = _NUMBERS.unpack_from(content)
        return Frame(
            kind=Kind(kind),
            status=Status(status),
            numbers=tuple(numbers),
            digest=content[_NUMBERS.size :],
        )

    def _proof(self, content: bytes) -> bytes:
        return blake2b(content, key=self._key, digest_size=DIGEST_BYTES, person=b"frame").digest()
