"""The chunk store: who wants which chunk, what to produce next, what to drop. Pure bookkeeping.

Events go in, instructions come out; the server carries them out. A chunk is *absent*, *wanted*,
*in production* or *resident*; these are derived from the records below, never stored beside them.

Budget: resident bytes plus the expected bytes in production never exceed ``memory_bytes``, except
that a chunk some pass waits for right now is produced in any case (otherwise nothing could go on).
So the most that can be resident is the budget plus, per open pass, the chunks of one batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field

from optuna_fleet.pipeline.instructions import Drop, Grant, Instruction, Produce, Refuse
from optuna_fleet.pipeline.messages import ChunkError
from optuna_fleet.pipeline.residency import Residency
from optuna_fleet.pipeline.spec import ChunkKey

MAX_DEATHS = 2
"""A chunk over which this many preprocessors died is an error for those who asked for it."""


@dataclass(slots=True)
class _Pass:
    name: str
    epoch: int
    cursor: int
    continues: bool
    wanted: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)

    def key(self, chunk: int) -> ChunkKey:
        return ChunkKey(self.name, self.epoch, chunk)


@dataclass(slots=True)
class _Size:
    num_chunks: int
    chunk_bytes: int  # the largest seen so far: what the next one is expected to take


class ChunkStore:
    """Decides which chunks are produced, kept and dropped.

    Args:
        memory_bytes: The budget.
        max_chunks: Most chunks to keep, each being an open file of the agent.
        window: Chunks ahead of each open pass that are produced before they are asked for.
        fixed: Names of data sets whose only epoch is 0; their chunks are kept longest.
    """

    def __init__(
        self, *, memory_bytes: int, max_chunks: int, window: int, fixed: Iterable[str] = ()
    ) -> None:
        self._memory_bytes = memory_bytes
        self._max_chunks = max_chunks
        self._window = window
        self._residency = Residency(fixed)
        self._sizes: dict[str, _Size] = {}
        self._passes: dict[Hashable, _Pass] = {}
        self._waiting: dict[ChunkKey, dict[Hashable, bool]] = {}  # pass -> can't go on without
        self._warm: dict[ChunkKey, None] = {}
        self._producing: dict[ChunkKey, int] = {}  # expected bytes
        self._deaths: Counter[ChunkKey] = Counter()
        self._failed: set[ChunkKey] = set()

    @property
    def resident_bytes(self) -> int:
        """Bytes of all resident chunks."""
        return self._residency.total_bytes

    @property
    def num_resident(self) -> int:
        """Number of resident chunks."""
        return len(self._residency)

    # Passes

    def set_size(self, name: str, *, num_chunks: int, chunk_bytes: int) -> None:
        """Tells the number of chunks of an epoch of ``name`` and the bytes expected of each."""
        self._sizes[name] = _Size(num_chunks=num_chunks, chunk_bytes=chunk_bytes)

    def open_pass(
        self, pass_id: Hashable, name: str, epoch: int, cursor: int, *, continues: bool = False
    ) -> None:
        """Begins a pass over an epoch whose size is known, from chunk ``cursor``.

        If it ``continues``, its reader will go on with the next epoch.
        """
        assert name in self._sizes, name
        assert pass_id not in self._passes, pass_id
        self._passes[pass_id] = _Pass(name=name, epoch=epoch, cursor=cursor, continues=continues)
        self._residency.set_cursor(pass_id, name, epoch, cursor)

    def move(self, pass_id: Hashable, cursor: int) -> None:
        """Notes the first chunk that the pass still needs."""
        record = self._passes[pass_id]
        record.cursor = cursor
        self._residency.set_cursor(pass_id, record.name, record.epoch, cursor)

    def request(self, pass_id: Hashable, chunk: int, *, urgent: bool) -> list[Instruction]:
        """The pass wants a chunk; ``urgent`` if it can't go on without. May be repeated."""
        record = self._passes[pass_id]
        if chunk in record.held:
            return []
        key = record.key(chunk)
        if key in self._residency:
            self._residency.pin(key)
            record.held.add(chunk)
            return [Grant(pass_id=pass_id, key=key)]
        self._failed.discard(key)
        record.wanted.add(chunk)
        waiting = self._waiting.setdefault(key, {})
        waiting[pass_id] = urgent or waiting.get(pass_id, False)
        return []

    def release(self, pass_id: Hashable, chunks: Iterable[int]) -> list[Instruction]:
        """The pass gives chunks back."""
        record = self._passes[pass_id]
        for chunk in chunks:
            if chunk in record.held:
                record.held.discard(chunk)
                self._residency.unpin(record.key(chunk))
        return self._shrink()

    def close_pass(self, pass_id: Hashable) -> list[Instruction]:
        """Ends the pass, or its reader died: everything it held or wanted is let go."""
        record = self._passes.pop(pass_id)
        for chunk in record.wanted:
            waiting = self._waiting[record.key(chunk)]
            del waiting[pass_id]
            if not waiting:
                del self._waiting[record.key(chunk)]
        for chunk in record.held:
            self._residency.unpin(record.key(chunk))
        self._residency.remove_cursor(pass_id, record.name, record.epoch)
        return self._shrink()

    # Production

    def warm(self, key: ChunkKey) -> None:
        """Produces a chunk although nobody asked yet (the one that tells a data set's size)."""
        if key not in self._residency and key not in self._producing:
            self._warm[key] = None

    def assign(self) -> list[Instruction]:
        """Returns the next chunk to produce, after drops that make room.

        Chunks that passes wait for come first, then those requested ahead, then the windows,
        last the beginnings of next epochs.
        Without a Produce in the answer there is nothing to do that fits.
        """
        for key, urgent in self._candidates():
            expected = self._expected(key)
            drops, fits = self._make_room(expected, urgent=urgent)
            if not fits and not urgent:
                return drops  # the others are no smaller and no more urgent
            self._warm.pop(key, None)
            self._producing[key] = expected
            return [*drops, Produce(key=key)]
        return self._assign_next_epoch()

    def _assign_next_epoch(self) -> list[Instruction]:
        """Work for idle preprocessors: the beginning of the epoch that a pass will go on to.

        Nothing is dropped for it: no pass has its cursor there yet, so it would be the next to go.
        """
        for key in self._upcoming():
            expected = self._expected(key)
            if self._over(expected, 1):
                return []
            self._producing[key] = expected
            return [Produce(key=key)]
        return []

    def produced(self, key: ChunkKey, nbytes: int) -> list[Instruction]:
        """A chunk is there; everyone who waited for it gets it."""
        del self._producing[key]
        self._deaths.pop(key, None)
        self._residency.add(key, nbytes)
        if size := self._sizes.get(key.name):
            size.chunk_bytes = max(size.chunk_bytes, nbytes)
        grants: list[Instruction] = []
        for pass_id in self._waiting.pop(key, {}):
            record = self._passes[pass_id]
            record.wanted.discard(key.chunk)
            record.held.add(key.chunk)
            self._residency.pin(key)
            grants.append(Grant(pass_id=pass_id, key=key))
        return [*grants, *self._shrink()]

    def failed(self, key: ChunkKey, error: ChunkError) -> list[Instruction]:
        """A sample raised: those who waited are told; only a new request tries again."""
        del self._producing[key]
        self._deaths.pop(key, None)
        self._failed.add(key)
        refusals: list[Instruction] = []
        for pass_id in self._waiting.pop(key, {}):
            self._passes[pass_id].wanted.discard(key.chunk)
            refusals.append(Refuse(pass_id=pass_id, key=key, error=error))
        return refusals

    def lost(self, key: ChunkKey, error: ChunkError) -> list[Instruction]:
        """The preprocessor died over this chunk: once it is repeated, then it counts as failed."""
        self._deaths[key] += 1
        if self._deaths[key] >= MAX_DEATHS:
            return self.failed(key, error)
        del self._producing[key]
        if key.name not in self._sizes:
            self._warm[key] = None
        return []

    def has_failed(self, key: ChunkKey) -> bool:
        """Returns whether the last attempt at the chunk failed for good."""
        return key in self._failed

    # Choices

    def _candidates(self) -> Iterator[tuple[ChunkKey, bool]]:
        wanted = [key for key in self._waiting if key not in self._producing]
        urgent = [key for key in wanted if any(self._waiting[key].values())]
        yield from ((key, True) for key in urgent)
        yield from ((key, True) for key in list(self._warm))
        yield from ((key, False) for key in wanted if key not in urgent)
        yield from ((key, False) for key in self._windows())

    def _windows(self) -> Iterator[ChunkKey]:
        for distance in range(self._window):
            for record in self._passes.values():
                key = record.key(record.cursor + distance)
                if key.chunk < self._sizes[key.name].num_chunks and self._is_absent(key):
                    yield key

    def _upcoming(self) -> Iterator[ChunkKey]:
        for record in self._passes.values():
            num_chunks = self._sizes[record.name].num_chunks
            if record.continues:
                beyond = min(record.cursor + self._window - num_chunks, num_chunks)
                keys = (ChunkKey(record.name, record.epoch + 1, c) for c in range(beyond))
                yield from filter(self._is_absent, keys)

    def _is_absent(self, key: ChunkKey) -> bool:
        known = (self._residency, self._producing, self._failed)
        return not any(key in records for records in known)

    def _expected(self, key: ChunkKey) -> int:
        size = self._sizes.get(key.name)
        return size.chunk_bytes if size else 0

    def _over(self, extra_bytes: int, extra_chunks: int) -> bool:
        """Whether so much more would break the budget."""
        planned = self.resident_bytes + sum(self._producing.values()) + extra_bytes
        chunks = self.num_resident + len(self._producing) + extra_chunks
        return planned > self._memory_bytes or chunks > self._max_chunks

    def _make_room(self, nbytes: int, *, urgent: bool) -> tuple[list[Instruction], bool]:
        """Drops chunks until ``nbytes`` fit, and says whether they do.

        What can wait may not push out what readers will come to next.
        """
        if not urgent and self._over(nbytes - self._residency.idle_bytes, 1 - self.num_resident):
            return [], False  # known beforehand: not even without all idle chunks
        drops: list[Instruction] = []
        while self._over(nbytes, 1):
            key = self._residency.drop_worst(spare=0 if urgent else self._window)
            if key is None:
                return drops, False
            drops.append(Drop(key=key))
        return drops, True

    def _shrink(self) -> list[Instruction]:
        """Returns to the budget after an urgent chunk went beyond it."""
        drops: list[Instruction] = []
        while self._over(0, 0) and (key := self._residency.drop_worst(spare=0)):
            drops.append(Drop(key=key))
        return drops
