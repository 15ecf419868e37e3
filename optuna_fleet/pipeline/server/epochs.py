"""What is known of an epoch of a data set: the status of its chunks, and the passes through it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from optuna_fleet.pipeline.pipeline_messages import PassId
from optuna_fleet.pipeline.spec import ChunkKey, EpochKey, count_chunks

ABSENT, MAKING, IDLE, HELD, FAILED = range(5)
"""What a chunk is. One that failed stays so until it is asked for again."""


class Order(NamedTuple):
    """A chunk is to be made at this place of the arena, of at most ``max_bytes``."""

    key: ChunkKey
    address: int
    max_bytes: int


@dataclass(slots=True, kw_only=True)
class Size:
    """How a data set is cut into chunks.

    Attributes:
        num_samples: Its length.
        chunk_size: Samples of a chunk.
        chunk_bytes: Bytes of the largest chunk so far: what the next one may take.
        is_estimate: None was made yet.
    """

    num_samples: int
    chunk_size: int
    chunk_bytes: int
    is_estimate: bool = True

    @property
    def num_chunks(self) -> int:
        """Chunks of an epoch."""
        return count_chunks(self.num_samples, self.chunk_size)


@dataclass(slots=True, eq=False)
class Pass:
    """A reader's way through an epoch.

    Attributes:
        pass_id: Its reader, and its number among the passes of that.
        epoch: What it reads.
        cursor: The first chunk that is still needed.
        continues: The reader will go on with the next epoch.
        wanted: Chunks it waits for, and whether it can't go on without.
        held: Chunks that it was given.
    """

    pass_id: PassId
    epoch: Epoch
    cursor: int
    continues: bool
    wanted: dict[int, bool] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Epoch:
    """An epoch of which something is there, or is being read.

    Attributes:
        key: Its name.
        status: A byte for each chunk.
        rank: Chunks that nobody will come to go first where it is highest.
        passes: Those that are open.
        cursors: Where they are, in order.
        holders: How many of them hold a chunk.
        places: Address and bytes of chunks that are there or in production.
        deaths: How many preprocessors died over a chunk.
    """

    key: EpochKey
    status: bytearray
    rank: tuple[int, str, int] = (0, "", 0)
    passes: dict[PassId, Pass] = field(default_factory=dict)
    cursors: list[int] = field(default_factory=list)
    holders: Counter[int] = field(default_factory=Counter)
    places: dict[int, tuple[int, int]] = field(default_factory=dict)
    deaths: Counter[int] = field(default_factory=Counter)

    def chunk(self, number: int) -> ChunkKey:
        """Returns the name of a chunk."""
        name, epoch, owner = self.key
        return ChunkKey(name, epoch, number, owner)
