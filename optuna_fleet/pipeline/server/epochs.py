"""What is known of an epoch of a data set: the status of its chunks, and the passes through it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

from optuna_fleet.pipeline.messages import PassId
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


class Want(NamedTuple):
    """A pass wants a chunk: the urgent come first, of these those that were asked for first."""

    can_wait: bool
    number: int


@dataclass(slots=True, eq=False)
class Pass:
    """A reader's way through an epoch.

    Attributes:
        pass_id: Its reader, and its number among the passes of that.
        epoch: What it reads.
        cursor: The first chunk that is still needed.
        continues: The reader will go on with the next epoch.
        wanted: Chunks it waits for.
        held: Chunks that it was given.
        was_asked: To give them back.
    """

    pass_id: PassId
    epoch: Epoch
    cursor: int
    continues: bool
    wanted: dict[int, Want] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)
    was_asked: bool = False

    @property
    def is_stalled(self) -> bool:
        """Whether its reader can't go on without one of those it waits for."""
        return any(not want.can_wait for want in self.wanted.values())


@dataclass(slots=True, eq=False)
class Epoch:
    """An epoch of which something is there, or is being read.

    Attributes:
        key: Its name.
        status: A byte for each chunk.
        rank: Chunks that nobody will come to go first where it is highest.
        passes: Those that are open.
        places: Address and bytes of chunks that are there or in production.
        deaths: How many preprocessors died over a chunk.
    """

    key: EpochKey
    status: bytearray
    rank: tuple[int, str, int] = (0, "", 0)
    passes: dict[PassId, Pass] = field(default_factory=dict)
    places: dict[int, tuple[int, int]] = field(default_factory=dict)
    deaths: Counter[int] = field(default_factory=Counter)

    def chunk(self, number: int) -> ChunkKey:
        """Returns the name of a chunk."""
        name, epoch, owner = self.key
        return ChunkKey(name, epoch, number, owner)

    def cursors(self) -> list[int]:
        """Returns where the passes are, in order."""
        return sorted({each.cursor for each in self.passes.values()})

    def absent(self, begin: int, end: int) -> Iterator[int]:
        """Yields the chunks of a range that nobody has made."""
        chunk = self.status.find(ABSENT, begin, end)
        while chunk >= 0:
            yield chunk
            chunk = self.status.find(ABSENT, chunk + 1, end)


def nearest_absent(passes: Iterable[Pass], window: int) -> Iterator[ChunkKey]:
    """Yields chunks that nobody has made, the nearest to a cursor first.

    Of several as near that of the pass that comes first.
    """
    # Of each pass one: mostly nobody asks for a second.
    found = []
    for number, each in enumerate(passes):
        chunk = each.epoch.status.find(ABSENT, each.cursor, each.cursor + window)
        if chunk >= 0:
            found.append((chunk - each.cursor, number, each))
    heapify(found)
    while found:
        distance, number, each = found[0]
        yield each.epoch.chunk(each.cursor + distance)
        begin, end = each.cursor + distance + 1, each.cursor + window
        if (chunk := each.epoch.status.find(ABSENT, begin, end)) >= 0:
            heapreplace(found, (chunk - each.cursor, number, each))
        else:
            heappop(found)
