"""What the chunk store tells the server to do."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from optuna_fleet.pipeline.messages import ChunkError
from optuna_fleet.pipeline.spec import ChunkKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Hand the resident chunk to the pass, which holds it from now on."""

    pass_id: Hashable
    key: ChunkKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """Tell the pass that the chunk could not be produced."""

    pass_id: Hashable
    key: ChunkKey
    error: ChunkError


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """Free the chunk's memory."""

    key: ChunkKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Produce:
    """Give the chunk to a preprocessor."""

    key: ChunkKey


Instruction = Grant | Refuse | Drop | Produce
