"""The chunk store: who wants which chunk, what to produce next, what to drop. Pure bookkeeping.

Events go in, instructions come out; the server carries them out. A chunk is *absent*, *wanted*,
*in production* or *resident*; these are derived from the records below, never stored beside them.

Budgets: resident bytes plus those in production never exceed ``memory_bytes`` in memory and
``disk_bytes`` on the disk. What passes hold is never dropped, so where memory is short they are
asked to copy what they need and to give the chunks back: nobody waits while holding something.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass

from optuna_fleet.pipeline.messages import ChunkError
from optuna_fleet.pipeline.server.eviction import EvictionPolicy
from optuna_fleet.pipeline.server.instructions import (
    Drop,
    Grant,
    Instruction,
    Produce,
    Recall,
    Refuse,
)
from optuna_fleet.pipeline.server.meter import Queue
from optuna_fleet.pipeline.server.passes import Pass
from optuna_fleet.pipeline.spec import ChunkKey, Place

MAX_DEATHS = 3
"""A chunk over which this many preprocessors died is an error for those who asked for it."""

BRIEF_SHARE = 0.5
"""Chunks beyond this part of the budget are only lent briefly, and not before they are needed.

So readers that stand still can't keep the others from going on.
"""


@dataclass(slots=True)
class _Size:
    num_chunks: int
    chunk_bytes: int  # the largest seen so far: what the next one may take
    is_estimate: bool = True


class ChunkStore:
    """Decides which chunks are produced, kept and dropped.

    Args:
        memory_bytes: The budget of chunks in memory.
        disk_bytes: The budget of chunks in the spill folder.
        max_chunks: Most chunks to keep, each being an open file of the agent.
        window: Chunks ahead of each open pass that are produced before they are asked for.
        fixed: Names of data sets whose only epoch is 0; their chunks are kept longest.
        rolling: A pass begins where others are, not at the beginning of an epoch.
    """

    def __init__(
        self,
        *,
        memory_bytes: int,
        max_chunks: int,
        window: int,
        disk_bytes: int = 0,
        fixed: Iterable[str] = (),
        rolling: bool = False,
    ) -> None:
        self._budgets: dict[Place, int] = {"memory": memory_bytes, "disk": disk_bytes}
        self._max_chunks = max_chunks
        self._window = window
        self._eviction = EvictionPolicy(fixed, rolling=rolling)
        self._sizes: dict[str, _Size] = {}
        self._passes: dict[Hashable, Pass] = {}
        self._heads: Counter[str] = Counter()  # chunks before the farthest place of any pass
        self._waiting: dict[ChunkKey, dict[Hashable, bool]] = {}  # pass -> can't go on without
        self._producing: dict[ChunkKey, Produce] = {}
        self._deaths: Counter[ChunkKey] = Counter()
        self._failed: set[ChunkKey] = set()

    @property
    def num_resident(self) -> int:
        """Number of resident chunks."""
        return len(self._eviction)

    def resident_bytes(self, place: Place = "memory") -> int:
        """Returns the bytes of all resident chunks."""
        return self._eviction.total_bytes(place)

    def lent_bytes(self, place: Place = "memory") -> int:
        """Returns the bytes of the chunks that passes hold."""
        return self._eviction.total_bytes(place) - self._eviction.idle_bytes(place)

    def planned_bytes(self) -> int:
        """Returns the bytes of all chunks in memory, those in production included."""
        return self.resident_bytes() + self._ordered_bytes("memory")

    def set_budget(self, place: Place, nbytes: int) -> list[Instruction]:
        """Changes a budget from now on."""
        self._budgets[place] = nbytes
        drops: list[Instruction] = []
        while self._over(place, 0) and (key := self._eviction.drop_worst(spare=0)):
            drops.append(Drop(key=key))
        return drops

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
        self._passes[pass_id] = Pass(name=name, epoch=epoch, cursor=cursor, continues=continues)
        self._eviction.set_cursor(pass_id, name, epoch, cursor)

    def move(self, pass_id: Hashable, cursor: int) -> None:
        """Notes the first chunk that the pass still needs."""
        record = self._passes[pass_id]
        record.cursor = cursor
        self._eviction.set_cursor(pass_id, record.name, record.epoch, cursor)
        self._reached(record, cursor)

    def request(self, pass_id: Hashable, chunk: int, *, urgent: bool) -> list[Instruction]:
        """The pass wants a chunk; ``urgent`` if it can't go on without. May be repeated."""
        record = self._passes[pass_id]
        if chunk in record.held:
            return []
        key = record.key(chunk)
        if key in self._eviction:
            return self._lend(pass_id, key, urgent=urgent)
        self._failed.discard(key)
        record.wanted.add(chunk)
        waiting = self._waiting.setdefault(key, {})
        waiting[pass_id] = urgent or waiting.get(pass_id, False)
        return []

    def release(self, pass_id: Hashable, chunks: Iterable[int]) -> None:
        """The pass gives chunks back."""
        record = self._passes[pass_id]
        for chunk in chunks:
            if chunk in record.held:
                record.held.discard(chunk)
                self._eviction.unpin(record.key(chunk))
        record.recalled &= bool(record.held)

    def close_pass(self, pass_id: Hashable, end: int = 0) -> None:
        """Ends the pass, or its reader died: everything it held or wanted is let go.

        Args:
            pass_id: The pass.
            end: The next chunk that it would have read, if that is known.
        """
        record = self._passes.pop(pass_id)
        self._reached(record, end)
        for chunk in record.wanted:
            waiting = self._waiting[record.key(chunk)]
            del waiting[pass_id]
            if not waiting:
                del self._waiting[record.key(chunk)]
        for chunk in record.held:
            self._eviction.unpin(record.key(chunk))
        self._eviction.remove_cursor(pass_id, record.name, record.epoch)

    def head(self, name: str) -> tuple[int, int]:
        """Returns the epoch and the chunk up to which passes have come: it never goes back."""
        return divmod(self._heads[name], self._sizes[name].num_chunks)

    def _reached(self, record: Pass, chunk: int) -> None:
        num_chunks = self._sizes[record.name].num_chunks
        if 0 < chunk <= num_chunks:  # the exchange's passes are beyond
            place = record.epoch * num_chunks + chunk
            self._heads[record.name] = max(self._heads[record.name], place)

    def _lend(self, pass_id: Hashable, key: ChunkKey, *, urgent: bool) -> list[Instruction]:
        record = self._passes[pass_id]
        record.wanted.discard(key.chunk)
        self._eviction.pin(key)
        brief = self._is_short(self._eviction.place(key))
        if brief and not urgent:  # it will be asked for again
            self._eviction.unpin(key)
            return []
        record.held.add(key.chunk)
        return [Grant(pass_id=pass_id, key=key, brief=brief)]

    def _is_short(self, place: Place) -> bool:
        """Whether what is left beside the lent chunks is too little for comfort."""
        lent, budget = self.lent_bytes(place), self._budgets[place]
        largest = max(size.chunk_bytes for size in self._sizes.values())
        return lent > BRIEF_SHARE * budget or lent + largest > budget

    @property
    def num_passes(self) -> int:
        """Number of open passes."""
        return len(self._passes)

    def num_stalled(self) -> int:
        """Returns how many passes can't go on without a chunk that is not there."""
        waiting = self._waiting.values()
        return len({p for passes in waiting for p, urgent in passes.items() if urgent})

    def queue(self) -> Queue:
        """Returns how far production is ahead of the passes."""
        num_ready = num_ahead = 0
        for record in self._passes.values():
            end = min(record.cursor + self._window, self._sizes[record.name].num_chunks)
            ahead = range(record.cursor + 1, end)
            num_ahead += len(ahead)
            num_ready += sum(record.key(chunk) in self._eviction for chunk in ahead)
        has_work = next(self._candidates(), None) is not None
        return Queue(num_ready=num_ready, num_ahead=num_ahead, has_work=has_work)

    # Production

    def assign(self, accept: Callable[[ChunkKey], bool] = lambda key: True) -> list[Instruction]:
        """Returns the next chunk to produce, after drops that make room.

        Chunks that passes wait for come first, then those requested ahead, then the windows,
        last the beginnings of next epochs.
        Without a Produce in the answer there is nothing to do that fits.

        Args:
            accept: Whether somebody is free to produce this chunk now.
        """
        refusals: list[Instruction] = []
        for key, urgent in self._candidates():
            if not accept(key):
                continue
            nbytes = self._sizes[key.name].chunk_bytes
            if nbytes > max(self._budgets.values()):
                refusals += self._refuse(key, _too_large(key, nbytes, self._budgets["memory"]))
                continue
            drops, place = self._make_room(nbytes, urgent=urgent)
            if place is None:  # the others are no smaller and no more urgent
                return [*refusals, *drops, *(self._recalls() if urgent else [])]
            return [*refusals, *drops, self._produce(key, nbytes, place)]
        return [*refusals, *self._assign_next_epoch(accept)]

    def _assign_next_epoch(self, accept: Callable[[ChunkKey], bool]) -> list[Instruction]:
        """Work for idle preprocessors: the beginning of the epoch that a pass will go on to.

        Nothing is dropped for it: no pass has its cursor there yet, so it would be the next to go.
        """
        for key in filter(accept, self._upcoming()):
            nbytes = self._sizes[key.name].chunk_bytes
            if self._over("memory", nbytes, 1):
                return []
            return [self._produce(key, nbytes, "memory")]
        return []

    def _produce(self, key: ChunkKey, nbytes: int, place: Place) -> Produce:
        self._producing[key] = Produce(key=key, max_bytes=nbytes, place=place)
        return self._producing[key]

    def produced(self, key: ChunkKey, nbytes: int) -> list[Instruction]:
        """A chunk is there; everyone who waited for it gets it."""
        order = self._producing.pop(key)
        assert nbytes <= order.max_bytes, (nbytes, order)
        self._deaths.pop(key, None)
        self._eviction.add(key, nbytes, order.place)
        size = self._sizes[key.name]
        if size.is_estimate and key.chunk + 1 < size.num_chunks:
            size.chunk_bytes, size.is_estimate = nbytes, False
        lent: list[Instruction] = []
        for pass_id, urgent in self._waiting.pop(key, {}).items():
            lent += self._lend(pass_id, key, urgent=urgent)
        return lent

    def outgrew(self, key: ChunkKey, nbytes: int) -> None:
        """A chunk is larger than any before: it is to be produced again where there is room."""
        del self._producing[key]
        size = self._sizes[key.name]
        size.chunk_bytes, size.is_estimate = max(size.chunk_bytes, nbytes), False

    def disk_failed(self, key: ChunkKey) -> list[Instruction]:
        """A chunk could not be written to the disk: it is for those there are from now on."""
        del self._producing[key]
        return self.set_budget("disk", 0)

    def failed(self, key: ChunkKey, error: ChunkError) -> list[Instruction]:
        """A sample raised: those who waited are told; only a new request tries again."""
        del self._producing[key]
        return self._refuse(key, error)

    def _refuse(self, key: ChunkKey, error: ChunkError) -> list[Instruction]:
        self._deaths.pop(key, None)
        self._failed.add(key)
        refusals: list[Instruction] = []
        for pass_id in self._waiting.pop(key, {}):
            self._passes[pass_id].wanted.discard(key.chunk)
            refusals.append(Refuse(pass_id=pass_id, key=key, error=error))
        return refusals

    def lost(self, key: ChunkKey, error: ChunkError) -> list[Instruction]:
        """The preprocessor died over this chunk: once it is repeated, then it counts as failed."""
        if key not in self._producing:
            return []  # it was done, but for the rest of what follows from that
        self._deaths[key] += 1
        if self._deaths[key] >= MAX_DEATHS:
            return self.failed(key, error)
        del self._producing[key]
        return []

    # Choices

    def _candidates(self) -> Iterator[tuple[ChunkKey, bool]]:
        wanted = [key for key in self._waiting if key not in self._producing]
        urgent = [key for key in wanted if any(self._waiting[key].values())]
        yield from ((key, True) for key in urgent)
        yield from ((key, False) for key in wanted if key not in urgent)
        yield from ((key, False) for key in self._windows())

    def _windows(self) -> Iterator[ChunkKey]:
        places = dict.fromkeys(  # readers of a like pace are at the same place
            (record.name, record.epoch, record.cursor)
            for record in self._passes.values()
            if self._eviction.num_chunks(record.name, record.epoch)
            < self._sizes[record.name].num_chunks
        )
        for distance in range(self._window if places else 0):
            for name, epoch, cursor in places:
                key = ChunkKey(name, epoch, cursor + distance)
                if key.chunk < self._sizes[name].num_chunks and self._is_absent(key):
                    yield key

    def _upcoming(self) -> Iterator[ChunkKey]:
        for record in self._passes.values():
            num_chunks = self._sizes[record.name].num_chunks
            if record.continues:
                beyond = min(record.cursor + self._window - num_chunks, num_chunks)
                keys = (ChunkKey(record.name, record.epoch + 1, c) for c in range(beyond))
                yield from filter(self._is_absent, keys)

    def _is_absent(self, key: ChunkKey) -> bool:
        known = (self._eviction, self._producing, self._failed)
        return not any(key in records for records in known)

    def _over(self, place: Place, extra_bytes: int, extra_chunks: int = 0) -> bool:
        """Whether so much more would break a budget."""
        total = self.resident_bytes(place) + self._ordered_bytes(place) + extra_bytes
        chunks = self.num_resident + len(self._producing) + extra_chunks
        return total > self._budgets[place] or chunks > self._max_chunks

    def _ordered_bytes(self, place: Place) -> int:
        orders = self._producing.values()
        return sum(order.max_bytes for order in orders if order.place == place)

    def _fitting(self, nbytes: int) -> Place | None:
        places: tuple[Place, ...] = ("memory", "disk")
        return next((place for place in places if not self._over(place, nbytes, 1)), None)

    def _make_room(self, nbytes: int, *, urgent: bool) -> tuple[list[Instruction], Place | None]:
        """Drops chunks until ``nbytes`` fit, and says where they do.

        What can wait may not push out what readers will come to next.
        """
        if not self._could_fit(nbytes):
            return [], None  # known beforehand: not even without all idle chunks
        drops: list[Instruction] = []
        while (place := self._fitting(nbytes)) is None:
            key = self._eviction.drop_worst(spare=0 if urgent else self._window)
            if key is None:
                break
            drops.append(Drop(key=key))
        return drops, place

    def _could_fit(self, nbytes: int) -> bool:
        places: tuple[Place, ...] = ("memory", "disk")
        return any(
            not self._over(
                place, nbytes - self._eviction.idle_bytes(place), 1 - self._eviction.num_idle
            )
            for place in places
        )

    def _recalls(self) -> list[Instruction]:
        """Somebody can't go on for want of memory: whoever holds chunks is to copy them."""
        recalls: list[Instruction] = []
        for pass_id, record in self._passes.items():
            if record.held and not record.recalled:
                record.recalled = True
                recalls.append(Recall(pass_id=pass_id))
        return recalls


def _too_large(key: ChunkKey, nbytes: int, budget: int) -> ChunkError:
    return ChunkError(
        summary=f"A chunk of data set {key.name!r} takes {nbytes} bytes, but all preprocessed "
        f"data together may take {budget}: give SharedPipeline a larger memory_bytes."
    )
