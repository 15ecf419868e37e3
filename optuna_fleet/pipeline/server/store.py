"""The chunk store: who wants which chunk, what to produce next, what to drop. Pure bookkeeping.

Events go in; orders for preprocessors come out, and what readers are to be told is put into
``outbox``. An event costs O(log n), however many chunks, preprocessors and readers there are. Only
where chunks that are held leave little room does lending one look at all of these; and where every
idle chunk is one that somebody is yet to read, dropping one is proportional to the number of
passes.

Chunks lie in a `Space`, whose budget can't be exceeded. What passes hold is never dropped, so
where room is short they are asked to copy what they need and to give the chunks back: nobody waits
while holding something.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable
from itertools import chain

from optuna_fleet.pipeline.messages import (
    ChunkError,
    ChunkFailed,
    ChunkReady,
    PassId,
    ReleaseChunks,
)
from optuna_fleet.pipeline.server.allocator import Space, pages
from optuna_fleet.pipeline.server.epochs import Epoch, Order, Pass, Size
from optuna_fleet.pipeline.server.lookahead import Lookahead
from optuna_fleet.pipeline.server.residents import Residents
from optuna_fleet.pipeline.spec import ChunkKey, EpochKey

MAX_DEATHS = 3
"""A chunk over which this many preprocessors died is an error for those who asked for it."""


class ChunkStore:
    """Decides which chunks are produced, kept and dropped.

    Args:
        space: Where chunks lie.
        window: Chunks ahead of each open pass that are produced before they are asked for.
        fixed: Names of data sets whose only epoch is 0; their chunks are kept longest.

    Attributes:
        outbox: What is to be said to readers, and to whom; the server empties it.
        passes: Those that are open.
        residents: The chunks that are there.
    """

    def __init__(self, space: Space, *, window: int, fixed: Iterable[str] = ()) -> None:
        self.outbox: deque[tuple[Hashable, object]] = deque()
        self._space = space
        self._window = window
        self._fixed = frozenset(fixed)
        self._sizes: dict[str, Size] = {}
        self._epochs: dict[EpochKey, Epoch] = {}
        self.passes: dict[PassId, Pass] = {}
        self._num_opened = 0
        self._holding: dict[Pass, None] = {}  # and not yet asked to give back
        self._stalled: set[Pass] = set()
        self._urgent: OrderedDict[ChunkKey, None] = OrderedDict()
        self._eager: OrderedDict[ChunkKey, None] = OrderedDict()
        self._lookahead = Lookahead(window, self._epochs, self._sizes)
        self.residents = Residents(space, self._epochs, self._lookahead)

    @property
    def num_stalled(self) -> int:
        """How many passes can't go on without a chunk that is not there."""
        return len(self._stalled)

    @property
    def has_work(self) -> bool:
        """Whether something is wanted that is neither there nor in production."""
        return bool(self._urgent or self._eager) or self._lookahead.next() is not None

    def ready(self) -> tuple[int, int]:
        """Returns how many chunks are there ahead of the passes, and how many could be."""
        return self._lookahead.ready()

    # Passes

    def set_size(self, name: str, *, num_samples: int, chunk_size: int, chunk_bytes: int) -> None:
        """Tells how epochs of a data set are cut, once, and the bytes expected of a chunk."""
        self._sizes[name] = Size(
            num_samples=num_samples, chunk_size=chunk_size, chunk_bytes=chunk_bytes
        )

    def size(self, name: str) -> Size:
        """Returns how a data set is cut into chunks; `set_size` must have told."""
        return self._sizes[name]

    def num_producing(self, owner: int) -> int:
        """How many chunks are being made for one owner alone."""
        return sum(len(e.producing) for e in self._epochs.values() if e.owner == owner)

    def open_pass(
        self,
        pass_id: PassId,
        name: str,
        epoch: int,
        cursor: int,
        *,
        continues: bool = False,
        owner: int | None = None,
    ) -> None:
        """Begins a pass over an epoch whose size is known, from chunk ``cursor``.

        If it ``continues``, its reader will go on with the next epoch. With an ``owner``, it
        shares what is made with the passes of that owner alone, and nothing of it is kept.
        """
        assert pass_id not in self.passes, pass_id
        found = self._epoch(EpochKey(name, epoch, owner))
        record = Pass(pass_id, self._num_opened, found, cursor, continues)
        self._num_opened += 1
        self.passes[pass_id] = found.passes[pass_id] = record
        found.cursors.append(cursor)
        found.cursors.sort()
        self._lookahead.add(record)
        self.residents.update(found)

    def move(self, pass_id: PassId, cursor: int) -> None:
        """Notes the first chunk that the pass still needs."""
        record = self.passes[pass_id]
        if cursor == record.cursor:
            return
        if cursor < record.cursor:
            record.frontier = cursor
        record.epoch.move(record, cursor)
        self.residents.update(record.epoch)
        self._lookahead.update(record)

    def request(self, pass_id: PassId, chunk: int, *, urgent: bool) -> None:
        """The pass wants a chunk; ``urgent`` if it can't go on without. May be repeated."""
        record = self.passes[pass_id]
        epoch = record.epoch
        if chunk in record.held:
            return
        if chunk in epoch.chunks:
            self._lend(record, chunk, urgent=urgent)
            return
        if chunk in epoch.failed:
            epoch.failed.discard(chunk)
            self._lookahead.absent(epoch, chunk)
        record.wanted[chunk] = urgent or record.wanted.get(chunk, False)
        if urgent:
            self._stalled.add(record)
        epoch.waiting.setdefault(chunk, {})[record] = None
        if chunk not in epoch.producing:
            self._queue(epoch.key(chunk), urgent=urgent)

    def release(self, pass_id: PassId, chunks: Iterable[int]) -> None:
        """The pass gives chunks back."""
        record = self.passes[pass_id]
        for chunk in record.held.intersection(chunks):
            record.held.discard(chunk)
            self.residents.unpin(record.epoch, chunk)
            self._holding[record] = None  # it may be asked again for those it still has
        if not record.held:
            self._holding.pop(record, None)

    def close_pass(self, pass_id: PassId) -> None:
        """Ends the pass, or its reader died: everything it held or wanted is let go."""
        record = self.passes.pop(pass_id)
        epoch = record.epoch
        for chunk in record.wanted:
            waiting = epoch.waiting[chunk]
            del waiting[record]
            if not waiting:
                del epoch.waiting[chunk]
                self._unqueue(epoch.key(chunk))
        for chunk in record.held:
            self.residents.unpin(epoch, chunk)
        self._holding.pop(record, None)
        self._stalled.discard(record)
        self._lookahead.remove(record)
        del epoch.passes[pass_id]
        epoch.move(record, None)
        self.residents.update(epoch)
        if epoch.owner is not None and not epoch.passes:
            self.residents.drop_idle(epoch)
        self.residents.forget(epoch)

    # Production

    def assign(self, accept: Callable[[ChunkKey], bool] | None = None) -> Order | None:
        """Returns what to make next, where room was made for it; None if there is nothing.

        Chunks that passes wait for come first, then those requested ahead, then the windows,
        last the beginnings of next epochs, for which nothing is dropped: no pass has its cursor
        there yet, so they would be the next to go.

        Args:
            accept: Whether somebody is free for this chunk now; None if for any. Where chunks are
                left out, this costs more.
        """
        while key := self._candidate(accept):
            nbytes = self.order_bytes(key)
            if nbytes > self._space.nbytes:
                self._refuse(key, _too_large(key, nbytes, self._space.nbytes))
                continue
            urgent = key in self._urgent
            # What can wait may not push out what readers will come to next.
            spare = 0 if urgent else self._window
            address = self.residents.make_room(nbytes, spare=spare)
            if address is not None:
                return self._order(key, nbytes, address)
            if urgent:  # the others are no smaller and no more urgent
                self._recall()
            return None
        key = self._lookahead.upcoming()
        if key is not None and (accept is None or accept(key)):
            nbytes = self.order_bytes(key)
            if (address := self._space.allocate(nbytes)) is not None:
                return self._order(key, nbytes, address)
        return None

    def _candidate(self, accept: Callable[[ChunkKey], bool] | None) -> ChunkKey | None:
        if accept is None:
            return next(iter(self._urgent or self._eager), None) or self._lookahead.next()
        keys = chain(self._urgent, self._eager, self._lookahead.all())
        return next(filter(accept, keys), None)

    def produced(self, key: ChunkKey, nbytes: int) -> None:
        """A chunk is there; everyone who waited for it gets it."""
        epoch = self._epochs[key.of_epoch]
        epoch.deaths.pop(key.chunk, None)
        self.residents.add(epoch, epoch.producing.pop(key.chunk), nbytes)
        if epoch.size.is_estimate and key.chunk + 1 < epoch.num_chunks:
            epoch.size.chunk_bytes, epoch.size.is_estimate = nbytes, False
        for record in epoch.waiting.pop(key.chunk, {}):
            urgent = self._no_longer_wants(record, key.chunk)
            self._lend(record, key.chunk, urgent=urgent)

    def end_order(self, key: ChunkKey) -> Epoch:
        """A chunk is no longer in production: its place is free, and it may be ordered again."""
        epoch = self._epochs[key.of_epoch]
        order = epoch.producing.pop(key.chunk)
        self._space.free(order.address, order.max_bytes)
        if waiting := epoch.waiting.get(key.chunk):
            urgent = any(record.wanted[key.chunk] for record in waiting)
            self._queue(key, urgent=urgent)
            (self._urgent if urgent else self._eager).move_to_end(key, last=False)
        self._lookahead.absent(epoch, key.chunk)
        self.residents.forget(epoch)
        return epoch

    def outgrew(self, key: ChunkKey, nbytes: int) -> None:
        """A chunk is larger than any before: it is to be produced again where there is room."""
        size = self.end_order(key).size
        size.chunk_bytes, size.is_estimate = max(size.chunk_bytes, nbytes), False

    def failed(self, key: ChunkKey, error: ChunkError) -> None:
        """A sample raised: those who waited are told; only a new request tries again."""
        self.end_order(key)
        self._refuse(key, error)

    def lost(self, key: ChunkKey, error: ChunkError) -> None:
        """The preprocessor died over this chunk: once it is repeated, then it counts as failed."""
        epoch = self._epochs.get(key.of_epoch)
        if epoch is None or key.chunk not in epoch.producing:
            return  # it was done, but for the rest of what follows from that
        epoch.deaths[key.chunk] += 1
        if epoch.deaths[key.chunk] >= MAX_DEATHS:
            self.failed(key, error)
        else:
            self.end_order(key)

    # What they have in common

    @property
    def _largest(self) -> int:
        """Bytes of the largest chunk that is expected."""
        return pages(max(size.chunk_bytes for size in self._sizes.values()))

    def _epoch(self, key: EpochKey) -> Epoch:
        found = self._epochs.get(key)
        if found is None:
            name, number, owner = key
            # The latest are given up first, as every new trial starts at epoch 0.
            rank = -1 if name in self._fixed else number
            ranks = rank, name, number, -1 if owner is None else owner
            found = self._epochs[key] = Epoch(name, number, owner, ranks, self._sizes[name])
        return found

    def _queue(self, key: ChunkKey, *, urgent: bool) -> None:
        if urgent:
            self._eager.pop(key, None)
            self._urgent[key] = None
        elif key not in self._urgent:
            self._eager[key] = None

    def _unqueue(self, key: ChunkKey) -> None:
        self._urgent.pop(key, None)
        self._eager.pop(key, None)

    def _no_longer_wants(self, record: Pass, chunk: int) -> bool:
        """Returns whether it was urgent."""
        urgent = record.wanted.pop(chunk)
        if not any(record.wanted.values()):
            self._stalled.discard(record)
        return urgent

    def _lend(self, record: Pass, chunk: int, *, urgent: bool) -> None:
        epoch = record.epoch
        brief = self.residents.is_short(epoch, chunk, self._largest)
        if brief and not urgent:
            return  # it will be asked for again
        self.residents.pin(epoch, chunk)
        record.held.add(chunk)
        if len(record.held) == 1:
            self._holding[record] = None
        reader, number = record.pass_id
        self.outbox.append((reader, ChunkReady(number, chunk, *epoch.chunks[chunk], brief)))

    def order_bytes(self, key: ChunkKey) -> int:
        """Returns the bytes to leave for a chunk."""
        return pages(self.size(key.name).chunk_bytes)

    def _order(self, key: ChunkKey, nbytes: int, address: int) -> Order:
        epoch = self._epoch(key.of_epoch)
        order = epoch.producing[key.chunk] = Order(key, address, nbytes)
        self._unqueue(key)
        return order

    def _refuse(self, key: ChunkKey, error: ChunkError) -> None:
        epoch = self._epoch(key.of_epoch)
        epoch.deaths.pop(key.chunk, None)
        epoch.failed.add(key.chunk)
        self._unqueue(key)
        for record in epoch.waiting.pop(key.chunk, {}):
            self._no_longer_wants(record, key.chunk)
            reader, number = record.pass_id
            failure = ChunkFailed(pass_id=number, chunk=key.chunk, error=error)
            self.outbox.append((reader, failure))
        self.residents.forget(epoch)

    def _recall(self) -> None:
        """Somebody can't go on for want of memory: whoever holds chunks is to copy them."""
        for reader, number in (record.pass_id for record in self._holding):
            self.outbox.append((reader, ReleaseChunks(pass_id=number)))
        self._holding.clear()


def _too_large(key: ChunkKey, nbytes: int, budget: int) -> ChunkError:
    return ChunkError(
        summary=f"A chunk of data set {key.name!r} takes {nbytes} bytes, but all preprocessed "
        f"data together may take {budget}: give SharedPipeline a larger memory_bytes."
    )
