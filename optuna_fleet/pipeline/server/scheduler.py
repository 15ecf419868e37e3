"""Who reads which chunk, what to make next, what to drop. Pure: events in, orders and news out.

Each chunk of an epoch has a status, each pass through an epoch a cursor: the first chunk that it
still needs. What is to be made is found from the cursors onwards, what is to be dropped from the
far end towards them. Chunks lie in a `Space`, whose budget can't be exceeded. What passes hold is
never dropped, so where room is short they are asked to copy what they need and to give the chunks
back: nobody waits while holding something.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import merge
from itertools import count, pairwise
from operator import attrgetter

from optuna_fleet.pipeline.pipeline_messages import (
    ChunkError,
    ChunkFailed,
    ChunkReady,
    PassId,
    ProduceChunk,
    ReleaseChunks,
)
from optuna_fleet.pipeline.spec import ChunkKey, EpochKey, count_chunks

ABSENT, MAKING, IDLE, HELD, FAILED = range(5)
"""What a chunk is. One that failed stays so until it is asked for again."""


@dataclass(slots=True, kw_only=True)
class Size:
    """How a data set is cut into chunks.

    Attributes:
        num_samples: Its length.
        chunk_size: Samples of a chunk.
        chunk_bytes: Bytes of the largest chunk so far, or as measured: what the next may take.
    """

    num_samples: int
    chunk_size: int
    chunk_bytes: int

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


MAX_DEATHS = 3
"""A chunk over which this many preprocessors died is an error for those who asked for it."""

BRIEF_SHARE = 0.5
"""Chunks beyond this part of the budget are only lent briefly, and not before they are needed.

So readers that stand still can't keep the others from going on.
"""

_SHRINK = 8
"""A chunk gives back what it does not need, if that is more than one part in so many."""


class Scheduler:
    """Decides which chunks are made, kept, lent and dropped.

    First to go are chunks that no open pass will come to, the latest epoch first (every trial
    starts at epoch 0), its last chunk first; then those that are farthest ahead of every reader.

    Args:
        space: Where chunks lie.
        window: Chunks ahead of each open pass that are made before they are asked for.
        fixed: Names of data sets whose only epoch is 0; their chunks are kept longest.

    Attributes:
        outbox: What is to be said to readers, and to whom; the server empties it.
        passes: Those that are open.
        stalled: Those that can't go on without a chunk that is not there, the longest first.
        sizes: How data sets are cut, by name, once that is known.
        num_dropped: How many chunks made room for others.
        lent_bytes: Bytes that passes hold.
        is_blocked: Something is wanted that did not fit when somebody was free to make it.
    """

    def __init__(self, space: Space, *, window: int, fixed: Iterable[str] = ()) -> None:
        self.outbox: deque[tuple[Hashable, object]] = deque()
        self.passes: dict[PassId, Pass] = {}
        self.sizes: dict[str, Size] = {}
        self.num_dropped = 0
        self.lent_bytes = 0
        self._space = space
        self._window = window
        self._fixed = frozenset(fixed)
        self._epochs: dict[EpochKey, Epoch] = {}
        self._lent: set[tuple[int, int]] = set()
        self._idle_bytes = 0
        self.is_blocked = False
        self.stalled: dict[Pass, None] = {}

    def num_making(self, owner: int) -> int:
        """How many chunks are being made for one owner alone."""
        epochs = self._epochs.values()
        return sum(each.status.count(MAKING) for each in epochs if each.key.owner == owner)

    # Passes

    def open_pass(
        self, pass_id: PassId, key: EpochKey, cursor: int, *, continues: bool = False
    ) -> None:
        """Begins a pass over an epoch whose size is known, from chunk ``cursor``.

        If it ``continues``, its reader will go on with the next epoch. What is made for an owner
        alone is not kept after its last pass.
        """
        assert pass_id not in self.passes, pass_id
        epoch = self._epoch(key)
        self.passes[pass_id] = epoch.passes[pass_id] = Pass(pass_id, epoch, cursor, continues)

    def move(self, pass_id: PassId, cursor: int) -> None:
        """Notes the first chunk that the pass still needs."""
        self.passes[pass_id].cursor = cursor

    def request(self, pass_id: PassId, chunk: int, *, urgent: bool) -> None:
        """The pass wants a chunk; ``urgent`` if it can't go on without. May be repeated."""
        reader = self.passes[pass_id]
        status = reader.epoch.status
        if chunk in reader.held:
            return
        if status[chunk] in (IDLE, HELD):
            self._lend(reader, chunk, urgent=urgent)
            return
        if status[chunk] == FAILED:
            status[chunk] = ABSENT
        reader.wanted[chunk] = urgent or reader.wanted.get(chunk, False)
        if urgent:
            self.stalled.setdefault(reader)

    def release(self, pass_id: PassId, chunks: Iterable[int]) -> None:
        """The pass gives chunks back."""
        reader = self.passes[pass_id]
        for chunk in reader.held.intersection(chunks):
            self._take_back(reader, chunk)
            reader.is_recalled = False  # it may be asked again for those it still has

    def close_pass(self, pass_id: PassId) -> None:
        """Ends the pass, or its reader died: everything it held or wanted is let go."""
        reader = self.passes.pop(pass_id)
        epoch = reader.epoch
        del epoch.passes[pass_id]
        self.stalled.pop(reader, None)
        for chunk in [*reader.held]:
            self._take_back(reader, chunk)
        if epoch.key.owner is not None and not epoch.passes:
            while (chunk := epoch.status.find(IDLE)) >= 0:
                self._drop(epoch, chunk)
        self._forget(epoch)

    # What is made

    def assign(self, accept: Callable[[ChunkKey], bool] = lambda key: True) -> ProduceChunk | None:
        """Returns what to make next, where room was made for it; None if there is nothing.

        Chunks that passes wait for come first, then those requested ahead, then the windows,
        last the beginnings of next epochs, for which nothing is dropped: no pass has its cursor
        there yet, so they would be the next to go.

        Args:
            accept: Whether somebody is free for this chunk now.
        """
        self.is_blocked = False
        for key, urgent in self._candidates():
            if not accept(key):
                continue
            nbytes = self.order_bytes(key.name)
            if nbytes > self._space.nbytes:
                self._refuse(key, _too_large(key, nbytes, self._space.nbytes))
                continue
            # What can wait may not push out what readers will come to next.
            address = self._make_room(nbytes, spare=0 if urgent else self._window)
            if address is not None:
                return self._order(key, nbytes, address)
            self.is_blocked = True  # the others are no smaller and no more urgent
            if urgent:
                self._recall()
            return None
        for key in upcoming_absent(self.passes.values(), self._epochs, self._window):
            if accept(key):
                nbytes = self.order_bytes(key.name)
                address = self._space.allocate(nbytes)
                return None if address is None else self._order(key, nbytes, address)
        return None

    def order_bytes(self, name: str) -> int:
        """Returns the bytes to leave for a chunk of a data set."""
        return pages(self.sizes[name].chunk_bytes)

    def produced(self, key: ChunkKey, nbytes: int) -> None:
        """A chunk is there; everyone who waited for it gets it."""
        epoch, chunk = self._epochs[key.of_epoch], key.chunk
        address, taken = epoch.places[chunk]
        assert nbytes <= taken, (key, nbytes, taken)
        if (unused := taken - pages(nbytes)) > taken // _SHRINK:
            taken -= unused
            self._space.free(address + taken, unused)
        epoch.places[chunk] = address, taken
        epoch.status[chunk] = IDLE
        self._idle_bytes += taken
        epoch.deaths.pop(chunk, None)
        for reader, urgent in self._answered(epoch, chunk):
            self._lend(reader, chunk, urgent=urgent)

    def put_back(self, key: ChunkKey) -> None:
        """A chunk is no longer in production: its place is free, and it may be ordered again."""
        self._free(self._epochs[key.of_epoch], key.chunk)

    def outgrew(self, key: ChunkKey, nbytes: int) -> None:
        """A chunk is larger than any before: it is to be made again where there is room."""
        size = self.sizes[key.name]
        size.chunk_bytes = max(size.chunk_bytes, nbytes)
        self.put_back(key)

    def failed(self, key: ChunkKey, error: ChunkError) -> None:
        """A sample raised: those who waited are told; only a new request tries again."""
        self.put_back(key)
        self._refuse(key, error)

    def lost(self, key: ChunkKey, error: ChunkError) -> None:
        """A preprocessor died over this chunk: it is repeated, but not for ever."""
        epoch = self._epochs.get(key.of_epoch)
        if epoch is None or epoch.status[key.chunk] != MAKING:
            return  # it was done, but for the rest of what follows from that
        epoch.deaths[key.chunk] += 1
        if epoch.deaths[key.chunk] >= MAX_DEATHS:
            self.failed(key, error)
        else:
            self.put_back(key)

    # What they have in common

    def _epoch(self, key: EpochKey) -> Epoch:
        if (found := self._epochs.get(key)) is None:
            rank = -1 if key.name in self._fixed else key.epoch
            status = bytearray(self.sizes[key.name].num_chunks)
            found = self._epochs[key] = Epoch(key, status, (rank, key.name, key.owner or -1))
        return found

    def _forget(self, epoch: Epoch) -> None:
        if not (epoch.passes or epoch.places):
            self._epochs.pop(epoch.key, None)

    def _free(self, epoch: Epoch, chunk: int) -> None:
        epoch.status[chunk] = ABSENT
        self._space.free(*epoch.places.pop(chunk))
        self._forget(epoch)

    def _candidates(self) -> Iterator[tuple[ChunkKey, bool]]:
        """What is absent and wanted, and whether somebody waits for it; the first comes first."""
        for readers, is_stalled in ((self.stalled, True), (self.passes.values(), False)):
            for reader in [*readers]:
                for chunk, urgent in [*reader.wanted.items()]:
                    if urgent == is_stalled and reader.epoch.status[chunk] == ABSENT:
                        yield reader.epoch.chunk(chunk), urgent
        for key in nearest_absent(self.passes.values(), self._window):
            yield key, False

    def _order(self, key: ChunkKey, nbytes: int, address: int) -> ProduceChunk:
        epoch = self._epoch(key.of_epoch)
        epoch.status[key.chunk] = MAKING
        epoch.places[key.chunk] = address, nbytes
        size = self.sizes[key.name].chunk_size
        return ProduceChunk(key=key, chunk_size=size, address=address, max_bytes=nbytes)

    def _refuse(self, key: ChunkKey, error: ChunkError) -> None:
        epoch = self._epoch(key.of_epoch)
        epoch.deaths.pop(key.chunk, None)
        epoch.status[key.chunk] = FAILED
        for reader, _ in self._answered(epoch, key.chunk):
            failure = ChunkFailed(pass_id=reader.pass_id[1], chunk=key.chunk, error=error)
            self.outbox.append((reader.pass_id[0], failure))
        self._forget(epoch)

    def _answered(self, epoch: Epoch, chunk: int) -> list[tuple[Pass, bool]]:
        """Nobody need wait for a chunk any more; returns who did, and whether for it alone."""
        waited = [each for each in epoch.passes.values() if chunk in each.wanted]
        found = [(each, each.wanted.pop(chunk)) for each in waited]
        for each in waited:
            if not any(each.wanted.values()):
                self.stalled.pop(each, None)
        return found

    # Lending

    def _lend(self, reader: Pass, chunk: int, *, urgent: bool) -> None:
        epoch = reader.epoch
        place = epoch.places[chunk]
        if (brief := self._is_short(place)) and not urgent:
            return  # it will be asked for again
        if epoch.status[chunk] == IDLE:
            epoch.status[chunk] = HELD
            self._idle_bytes -= place[1]
            self.lent_bytes += place[1]
            self._lent.add(place)
        if not reader.held:
            reader.is_recalled = False
        reader.held.add(chunk)
        to, number = reader.pass_id
        self.outbox.append((to, ChunkReady(number, chunk, *place, brief)))

    def _take_back(self, reader: Pass, chunk: int) -> None:
        epoch = reader.epoch
        reader.held.discard(chunk)
        if not any(chunk in each.held for each in epoch.passes.values()):
            place = epoch.places[chunk]
            epoch.status[chunk] = IDLE
            self._lent.remove(place)
            self.lent_bytes -= place[1]
            self._idle_bytes += place[1]

    def _is_short(self, place: tuple[int, int]) -> bool:
        """Whether what is left beside this and the lent chunks is too little for comfort.

        The largest chunk must still find room in one piece.
        """
        total, lent = self._space.nbytes, self.lent_bytes + (place not in self._lent) * place[1]
        if lent > BRIEF_SHARE * total:
            return True
        largest = pages(max(size.chunk_bytes for size in self.sizes.values()))
        if total - lent >= largest * (len(self._lent) + 2):
            return False  # however they lie, one of the pieces between them is as large
        edges = [(0, 0), *sorted(self._lent | {place}), (total, 0)]
        return max(after - begin - n for (begin, n), (after, _) in pairwise(edges)) < largest

    def _recall(self) -> None:
        """Somebody can't go on for want of memory: whoever holds chunks is to copy them."""
        for (reader_id, number), reader in self.passes.items():
            if reader.held and not reader.is_recalled:
                reader.is_recalled = True
                self.outbox.append((reader_id, ReleaseChunks(pass_id=number)))

    # Dropping

    def _make_room(self, nbytes: int, *, spare: int) -> int | None:
        """Drops chunks until so many bytes fit in one piece, and returns where they do.

        None if they do not fit without what is held, or is one of the ``spare`` chunks from the
        cursor of an open pass on.
        """
        address = self._space.allocate(nbytes)
        if address is None and nbytes > self._space.nbytes - self._space.used + self._idle_bytes:
            return None  # known beforehand: not even without all idle chunks
        while address is None and (worst := self._worst(spare)) is not None:
            self._drop(*worst)
            address = self._space.allocate(nbytes)
        return address

    def _worst(self, spare: int) -> tuple[Epoch, int] | None:
        """The chunk to give up first."""
        epochs = sorted(self._epochs.values(), key=attrgetter("rank"), reverse=True)
        for epoch in epochs:
            first = min(epoch.cursors, default=len(epoch.status))
            if (chunk := epoch.status.rfind(IDLE, 0, first)) >= 0:
                return epoch, chunk
        found = None
        for epoch in epochs:
            for cursor, behind in pairwise([*epoch.cursors, len(epoch.status)]):
                chunk = epoch.status.rfind(IDLE, cursor, behind)
                if chunk - cursor >= spare and (found is None or chunk - cursor > found[0]):
                    found = chunk - cursor, epoch, chunk
        return found[1:] if found else None

    def _drop(self, epoch: Epoch, chunk: int) -> None:
        self.num_dropped += 1
        self._idle_bytes -= epoch.places[chunk][1]
        self._free(epoch, chunk)


def _too_large(key: ChunkKey, nbytes: int, budget: int) -> ChunkError:
    return ChunkError(
        summary=f"A chunk of data set {key.name!r} takes {nbytes} bytes, but all preprocessed "
        f"data together may take {budget}: give SharedPipeline a larger memory_bytes."
    )
