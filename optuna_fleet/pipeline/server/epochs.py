"""What the scheduler knows: epochs, the status and place of their chunks, passes, free space."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import merge
from itertools import count

from optuna_fleet.pipeline.pipeline_messages import PassId
from optuna_fleet.pipeline.spec import ChunkKey, EpochKey, count_chunks

ABSENT, MAKING, IDLE, HELD, FAILED = range(5)
"""What a chunk is. One that failed stays so until it is asked for again."""


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
        is_recalled: It was asked to give them back, and has not given back any since.
    """

    pass_id: PassId
    epoch: Epoch
    cursor: int
    continues: bool
    wanted: dict[int, bool] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)
    is_recalled: bool = False


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

    @property
    def cursors(self) -> list[int]:
        """Where the passes are, in order."""
        return sorted(each.cursor for each in self.passes.values())

    def chunk(self, number: int) -> ChunkKey:
        """Returns the name of a chunk."""
        name, epoch, owner = self.key
        return ChunkKey(name, epoch, number, owner)

    def absent(self, begin: int, end: int) -> Iterator[ChunkKey]:
        """Yields the names of absent chunks of a range."""
        while (number := self.status.find(ABSENT, begin, end)) >= 0:
            yield self.chunk(number)
            begin = number + 1


# What lies in the windows: so many chunks from the cursor of each pass on


def nearest_absent(passes: Iterable[Pass], window: int) -> Iterator[ChunkKey]:
    """Yields what is absent in the windows, the nearest to a cursor first."""

    def distances(number: int, reader: Pass) -> Iterator[tuple[int, int, ChunkKey]]:
        for key in reader.epoch.absent(reader.cursor, reader.cursor + window):
            yield key.chunk - reader.cursor, number, key

    return (key for *_, key in merge(*map(distances, count(), passes)))


def upcoming_absent(
    passes: Iterable[Pass], epochs: Mapping[EpochKey, Epoch], window: int
) -> Iterator[ChunkKey]:
    """Yields absent chunks at the beginning of epochs that passes will go on to."""
    for each in passes:
        num_chunks, key = len(each.epoch.status), each.epoch.key
        if each.continues and (beyond := each.cursor + window - num_chunks) > 0:
            key = key._replace(epoch=key.epoch + 1)
            later = epochs.get(key) or Epoch(key, bytearray(num_chunks))
            yield from later.absent(0, beyond)


# Places in the arena

PAGE = 4096
"""Bytes. Pieces begin at multiples of it, so that what a reader writes into one stays in it."""


def pages(nbytes: int) -> int:
    """Returns ``nbytes`` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


class Space:
    """Gives out pieces of whole pages: of the smallest hole that fits, the lowest of these.

    Attributes:
        nbytes: All of it.
        used: Bytes that are taken.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes // PAGE * PAGE
        self.used = self.nbytes
        self._holes: list[tuple[int, int]] = []  # begin and end, in order
        self.free(0, self.nbytes)

    def allocate(self, nbytes: int) -> int | None:
        """Returns the address of so many bytes; None if there are none in one piece."""
        fitting = [(end - begin, begin) for begin, end in self._holes if end - begin >= nbytes]
        if not fitting:
            return None
        length, begin = min(fitting)
        at = bisect_left(self._holes, (begin, 0))
        self._holes[at : at + 1] = [(begin + nbytes, begin + length)] if length > nbytes else []
        self.used += nbytes
        return begin

    def free(self, begin: int, nbytes: int) -> None:
        """Takes a piece back, or part of one."""
        if not nbytes:
            return
        self.used -= nbytes
        end, first = begin + nbytes, bisect_left(self._holes, (begin, 0))
        last = first
        if last < len(self._holes) and self._holes[last][0] == end:
            end, last = self._holes[last][1], last + 1
        if first and self._holes[first - 1][1] == begin:
            begin, first = self._holes[first - 1][0], first - 1
        self._holes[first:last] = [(begin, end)]
