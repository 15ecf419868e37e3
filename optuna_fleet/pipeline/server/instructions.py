"""What the chunk store tells the server to do."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from optuna_fleet.pipeline.messages import ChunkError
from optuna_fleet.pipeline.spec import ChunkKey


class Grant(NamedTuple):
    """Hand the resident chunk to the pass, which holds it from now on.

    ``brief`` if memory is short: the reader is to copy what it needs and to give it back at once.
    """

    pass_id: Hashable
    key: ChunkKey
    address: int
    nbytes: int
    brief: bool = False


class Recall(NamedTuple):
    """Ask the pass to copy what it needs of the chunks it holds and to give them back."""

    pass_id: Hashable


class Refuse(NamedTuple):
    """Tell the pass that the chunk could not be produced."""

    pass_id: Hashable
    key: ChunkKey
    error: ChunkError


class Drop(NamedTuple):
    """The chunk is gone, and its place free."""

    key: ChunkKey


class Produce(NamedTuple):
    """Have the chunk made, of at most ``max_bytes``, at this place of the arena."""

    key: ChunkKey
    address: int
    max_bytes: int


Instruction = Grant | Recall | Refuse | Drop | Produce
