"""What the chunk store tells the server to do."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from optuna_fleet.pipeline.messages import ChunkError
from optuna_fleet.pipeline.spec import ChunkKey, Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Hand the resident chunk to the pass, which holds it from now on.

    ``brief`` if memory is short: the reader is to copy what it needs and to give it back at once.
    """

    pass_id: Hashable
    key: ChunkKey
    brief: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    """Ask the pass to copy what it needs of the chunks it holds and to give them back."""

    pass_id: Hashable


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """Tell the pass that the chunk could not be produced."""

    pass_id: Hashable
    key: ChunkKey
    error: ChunkError


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """Free the chunk's memory, or its place on the disk."""

    key: ChunkKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Produce:
    """Have the chunk made, of at most ``max_bytes``, in memory or on the disk."""

    key: ChunkKey
    max_bytes: int
    place: Place = "memory"


Instruction = Grant | Recall | Refuse | Drop | Produce
