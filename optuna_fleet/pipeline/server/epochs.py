"""What is known of an epoch of a data set: its chunks, and the passes through it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from optuna_fleet.pipeline.messages import PassId
from optuna_fleet.pipeline.spec import ChunkKey, EpochKey, count_chunks


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


class Order(NamedTuple):
    """A chunk is to be made at this place of the arena, of at most ``max_bytes``."""

    key: ChunkKey
    address: int
    max_bytes: int


class Place(NamedTuple):
    """Where a resident chunk lies in the arena."""

    address: int
    nbytes: int


@dataclass(slots=True, eq=False)
class Pass:
    """A reader's way through an epoch.

    Attributes:
        pass_id: Its reader, and its number among the passes of that.
        number: How many there were before it.
        epoch: What it reads.
        cursor: The first chunk that is still needed.
        continues: The reader will go on with the next epoch.
        wanted: Chunks it waits for, and whether it can't go on without.
        held: Chunks that it was given.
        frontier: No chunk between the cursor and this one is absent.
        next_frontier: None of the next epoch before this one is.
        distance: From the cursor to the chunk that is to be made next; None if there is none.
    """

    pass_id: PassId
    number: int
    epoch: Epoch
    cursor: int
    continues: bool
    wanted: dict[int, bool] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)
    frontier: int = 0
    next_frontier: int = 0
    distance: int | None = None


@dataclass(slots=True, eq=False)
class Epoch:
    """A chunk of it is *absent*, *in production*, *resident*, or *failed* until asked for again.

    Attributes:
        name: The data set.
        number: Which epoch.
        owner: For whom alone it is made; None for all.
        rank: Its own; among epochs that nobody reads that of the highest is given up first.
        size: How it is cut.
        chunks: Where the resident chunks are.
        pins: How many passes hold them.
        idle: Those that nobody holds, in order.
        producing: The orders for those in production.
        failed: Those that could not be made.
        deaths: How many preprocessors died over a chunk.
        waiting: By chunk, who waits for it; in order.
        passes: The passes that are open.
        cursors: Theirs, in order.
        is_unneeded: Whether it counts as one that `has_unneeded` chunks.
    """

    name: str
    number: int
    owner: int | None
    rank: tuple[int, str, int, int]
    size: Size
    chunks: dict[int, Place] = field(default_factory=dict)
    pins: Counter[int] = field(default_factory=Counter)
    idle: list[int] = field(default_factory=list)
    producing: dict[int, Order] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    deaths: Counter[int] = field(default_factory=Counter)
    waiting: dict[int, dict[Pass, None]] = field(default_factory=dict)
    passes: dict[PassId, Pass] = field(default_factory=dict)
    cursors: list[int] = field(default_factory=list)
    is_unneeded: bool = False

    @property
    def num_chunks(self) -> int:
        """How many chunks it has."""
        return self.size.num_chunks

    @property
    def is_forgotten(self) -> bool:
        """Whether there is nothing to know of it."""
        return not (self.chunks or self.passes or self.producing)

    def key(self, chunk: int) -> ChunkKey:
        """Returns the name of a chunk."""
        return ChunkKey(self.name, self.number, chunk, self.owner)

    @property
    def named(self) -> EpochKey:
        """Its own name."""
        return EpochKey(self.name, self.number, self.owner)

    def is_known(self, chunk: int) -> bool:
        """Returns whether there is no need to make a chunk."""
        return chunk in self.chunks or chunk in self.producing or chunk in self.failed

    def move(self, record: Pass, cursor: int | None) -> None:
        """A pass moves to another cursor; to none at its end."""
        del self.cursors[bisect_left(self.cursors, record.cursor)]
        if cursor is not None:
            insort(self.cursors, cursor)
            record.cursor = cursor

    def rest(self, chunk: int) -> None:
        """Nobody holds a chunk any more."""
        insort(self.idle, chunk)

    def wake(self, chunk: int) -> None:
        """Somebody holds a chunk, or it is gone."""
        del self.idle[bisect_left(self.idle, chunk)]

    @property
    def has_unneeded(self) -> bool:
        """Whether there is an idle chunk that no open pass will come to."""
        return bool(self.idle) and (not self.cursors or self.idle[0] < self.cursors[0])

    def last_unneeded(self) -> int:
        """Returns the last of these chunks: a reader to come begins at the first."""
        end = bisect_left(self.idle, self.cursors[0]) if self.cursors else len(self.idle)
        return self.idle[end - 1]

    def farthest(self) -> Iterator[tuple[int, int]]:
        """Yields, for each cursor, the farthest idle chunk before the next one: distance first."""
        begin = 0
        while begin < len(self.cursors):
            cursor = self.cursors[begin]
            begin = bisect_right(self.cursors, cursor, begin)
            behind = self.cursors[begin] if begin < len(self.cursors) else self.num_chunks
            at = bisect_left(self.idle, behind) - 1
            if at >= 0 and self.idle[at] >= cursor:
                yield self.idle[at] - cursor, self.idle[at]
