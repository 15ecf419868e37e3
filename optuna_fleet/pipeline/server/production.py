"""How chunks get made: measures data sets, orders from preprocessors, reads their answers."""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Callable
from functools import partial

from optuna_fleet.exceptions import ProtocolError
from optuna_fleet.pipeline import limits
from optuna_fleet.pipeline.chunks.arena import Arena
from optuna_fleet.pipeline.exchange.peers import Asking, Peers
from optuna_fleet.pipeline.messages import (
    ChunkError,
    ChunkFetched,
    ChunkNotFetched,
    ChunkNotProduced,
    ChunkOutgrew,
    ChunkProduced,
    DiskFailed,
    ProduceChunk,
    SampleMeasured,
)
from optuna_fleet.pipeline.preprocessor.source import Source
from optuna_fleet.pipeline.server.allocator import Space
from optuna_fleet.pipeline.server.decoded import DecodedStore
from optuna_fleet.pipeline.server.epochs import Order
from optuna_fleet.pipeline.server.fetching import NUM_FETCHERS, Fetching
from optuna_fleet.pipeline.server.notices import Notices
from optuna_fleet.pipeline.server.sizing import Sizing
from optuna_fleet.pipeline.server.staffing import Levels, Meter, Staffing
from optuna_fleet.pipeline.server.store import ChunkStore
from optuna_fleet.pipeline.server.workers import PreprocessorPool, Spawn
from optuna_fleet.pipeline.spec import ChunkKey, PipelineSetup, count_chunks
from optuna_fleet.pipeline.stats import PipelineStats, PipelineUse

_LOOK_S = 0.02
"""The queues are looked at no more often: that costs time for each reader."""

_DIED = (
    "Preprocessors died over a chunk of data set {name!r}: killed, out of memory, a crash in "
    "native code, or stuck in it for too long."
)


class Production:
    """Has chunks made by preprocessors, from the decoded store where it helps.

    Args:
        load: Returns the data sets, in a child.
        setup: What the user wants, but the data sets.
        budgets: What it may take.
        arena: Where chunks and decoded samples lie.
        space: What is free of it.
        store: The chunk store, which is told of all results.
        counts: Where to count.
        spawn: Starts a child process.
        selector: The agent's selector.
        close_in_child: Called first in each preprocessor.
        on_idle: Called when there is one more who could work, or something new to do: to `work`.
        after: Called after each event of a preprocessor.
        clock: Seconds since any time.
        peers: The nodes that share chunks with this one.

    Attributes:
        pools: The preprocessors, and those who ask other nodes.
        notices: What the user is to be told.
    """

    def __init__(
        self,
        *,
        load: Callable[[], Source],
        setup: PipelineSetup,
        budgets: limits.Budgets,
        arena: Arena,
        space: Space,
        store: ChunkStore,
        counts: PipelineStats,
        spawn: Spawn,
        selector: selectors.BaseSelector,
        close_in_child: Callable[[], None],
        on_idle: Callable[[], None],
        after: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        peers: Peers | None = None,
    ) -> None:
        self._load = load
        self._spec = spec = setup.spec
        self._settings = setup.settings
        self._niceness = setup.niceness
        self._is_adaptive = setup.is_adaptive
        self._budgets = budgets
        self._arena = arena
        self._store = store
        self._counts = counts
        self._clock = clock
        self._on_idle = on_idle
        self._close_in_child = close_in_child
        self._lengths = {dataset.name: dataset.num_samples for dataset in spec.datasets}
        self._indices = {dataset.name: dataset.length for dataset in spec.datasets}
        self._decoded = DecodedStore(self._indices, budgets.decoded_bytes, space.decoded)
        self._memory_bytes = space.border
        self._recurring: set[str] = set()
        self._sizing = Sizing(spec, store, budgets.chunk_bytes, peers)
        self._mistrusted: set[str] = set()
        # By data set, epoch and chunk size, which chunks were made: there may be many.
        self._made: dict[tuple[str, int, int], bytearray] = {}
        self.notices = Notices(budgets, spec)
        self._peers = peers
        new_pool = partial(
            PreprocessorPool,
            spawn=spawn,
            main=self._preprocessor_main,
            selector=selector,
            on_message=self._received,
            on_lost=self._lost,
            on_idle=on_idle,
            on_unstarted=self.notices.unstarted,
            after=after,
            clock=clock,
        )
        self.pool, fetchers = new_pool(limit=setup.num_preprocessors), new_pool(limit=NUM_FETCHERS)
        self.pools = [self.pool, fetchers]
        self._fetching = Fetching(peers, fetchers, budgets.memory_bytes)
        self._staffing = Staffing(setup.num_preprocessors, is_adaptive=setup.is_adaptive)
        self._meter = Meter(clock())
        self._looked_s = float("-inf")
        self._ready = (0, 0)

    @property
    def decoded_bytes(self) -> int:
        """Bytes that the decoded store takes."""
        return self._decoded.used_bytes

    def use(self) -> PipelineUse:
        """Returns how the time was spent, up to now."""
        self._meter.advance(self._clock())
        return self._meter.use()

    def knows(self, name: str) -> bool:
        """Returns whether it is known how to cut a data set into chunks."""
        return name in self._sizing.found

    def expect_more(self, name: str) -> None:
        """There will be several epochs of this data set: the first fills the decoded store."""
        self._recurring.add(name)
        self._use_decoded(name)

    def measure(self, name: str, epoch: int) -> None:
        """Has the chunk size of a data set found out, from a sample of this epoch."""
        self._sizing.measure(name, epoch)

    def work(self) -> None:
        """Gives preprocessors work while there is any that fits."""
        self._meter.advance(self._clock())
        pool = self.pool
        pool.target = self._staffing.number
        while self._sizing.is_wanted and pool.has_room():
            pool.give(self._sizing.order())
        fetching = self._fetching
        while fetching.failed and pool.has_room():
            self._make(fetching.failed.popleft())
        while pool.has_room() or fetching.has_room():
            order = self._store.assign(None if self._peers is None else self._accepts)
            if order is None:
                break
            if self._is_elsewhere(order.key):
                size = self._store.chunk_size(order.key.name, order.key.epoch)
                fetching.order(order, size)
            else:
                self._make(order)
        self._look()

    def resume(self) -> None:
        """Tries again what could not be done; to be called now and then, before `work`."""
        for pool in self.pools:
            pool.resume(end_idle=self._is_adaptive)
        self._staffing.ended(self.pool.num_running)

    def _is_elsewhere(self, key: ChunkKey) -> bool:
        return self._fetching.is_elsewhere(key, self._store.order_bytes(key))

    def _accepts(self, key: ChunkKey) -> bool:
        """Whether somebody is free to make this chunk, or to fetch it."""
        return (self._fetching if self._is_elsewhere(key) else self.pool).has_room()

    def _make(self, order: Order) -> None:
        key = order.key
        size = self._store.chunk_size(key.name, key.epoch)
        split = self._decoded.serves(key.name)
        extents = self._decoded.lend(key, key.name, size) if split else ()
        self._share_memory()  # it may take more than was foreseen, where samples are unlike
        self.pool.give(
            ProduceChunk(
                key=key,
                chunk_size=size,
                address=order.address,
                max_bytes=order.max_bytes,
                split=split,
                extents=tuple(extents),
            )
        )

    def close(self) -> None:
        """Ends the preprocessors."""
        for pool in self.pools:
            pool.close()

    def close_in_child(self) -> None:
        """Closes what any forked child inherited."""
        for pool in self.pools:
            for channel in pool.channels:
                channel.close_in_child()

    def _look(self) -> None:
        """Notes what is so until the next event."""
        meter, store = self._meter, self._store
        if meter.now_s - self._looked_s >= _LOOK_S:
            self._ready, self._looked_s = store.ready(), meter.now_s
        meter.levels = Levels(
            running=self.pool.num_running,
            busy=self.pool.num_busy,
            is_blocked=store.has_work,
            reading=store.num_passes + self._sizing.num_measuring,
            stalled=store.num_stalled + self._sizing.num_measuring,
            ready=self._ready[0],
            window=self._ready[1],
        )

    def _use_decoded(self, name: str) -> None:
        found = self._sizing.found.get(name)
        if (
            found is not None
            and found.prepared_bytes is not None
            and name in self._recurring
            and name not in self._mistrusted
            and self._budgets.decoded_bytes
            and not self._decoded.serves(name)
        ):
            self._decoded.serve(name, found.prepared_bytes)
            self._share_memory()

    def _share_memory(self) -> None:
        """Chunks may take what the decoded store does not, as far as its samples are known."""
        border = self._memory_bytes - self._decoded.wanted_bytes
        self._store.residents.reserve(border)

    def _preprocessor_main(self, sock: socket.socket) -> None:
        self._close_in_child()
        os.nice(self._niceness)
        # Imported in the child: the agent itself never uses torch.
        from optuna_fleet.pipeline.preprocessor.decoded_samples import DecodedSamples
        from optuna_fleet.pipeline.preprocessor.main import preprocessor_main

        peers = self._peers
        preprocessor_main(
            sock,
            load=self._load,
            spec=self._spec,
            settings=self._settings,
            budgets=self._budgets,
            arena=self._arena,
            decoded=DecodedSamples(self._arena, self._decoded.table, self._indices),
            asking=Asking(peers.secret, peers.patience_s) if peers is not None else None,
        )

    # What preprocessors say

    def _received(self, message: object) -> None:
        match message:
            case ChunkFetched():
                self._fetched(message)
            case ChunkNotFetched(key=key, is_gone=is_gone):
                self._fetching.settle(key, has_failed=True, is_gone=is_gone)
            case SampleMeasured():
                self._set_size(message)
            case ChunkProduced():
                self._produced(message)
            case ChunkOutgrew(key=key, nbytes=nbytes):
                self._end_order(key)
                self._store.outgrew(key, nbytes)
            case DiskFailed(key=key, reason=reason):
                self._end_order(key)
                self.notices.disk_failed(reason)
                self._store.disk_failed(key)
            case ChunkNotProduced(key=key, error=error):
                self._end_order(key)
                self._store.failed(key, error)
            case _:
                raise ProtocolError(f"A preprocessor sent an unexpected {message!r}.")

    def _end_order(self, key: ChunkKey) -> None:
        """What an order was lent comes back."""
        self._fetching.settle(key, has_failed=False)
        self._decoded.publish(key, key.name, ())

    def _set_size(self, message: SampleMeasured) -> None:
        self._sizing.measured(message)
        self._use_decoded(message.key.name)

    def _produced(self, message: ChunkProduced) -> None:
        key, counts = message.key, self._counts
        counts.preprocessed += message.num_samples
        counts.busy_s += message.busy_s
        counts.num_loaded += message.num_loaded
        self.notices.count(key.name, message.num_samples, message.busy_s)
        self._note_repetition(message)
        self._sizing.made(message)
        if message.complaint is not None:
            counts.num_skipped += len(message.skipped)
            self.notices.skipped(key.name, message.skipped, message.complaint)
        self._decoded.publish(key, key.name, message.stored)
        if message.mismatch is not None:
            self._mistrusted.add(key.name)
            self._decoded.stop(key.name)
            self.notices.mismatch(key.name, message.mismatch)
        is_whole = message.num_loaded + len(message.stored) >= message.num_samples
        if self._decoded.is_full and self._decoded.serves(key.name) and not is_whole:
            self.notices.decoded_full(key.name, self._decoded.fitting_share(key.name))
        self._store.produced(key, message.nbytes)
        self._meter.advance(self._clock())
        running, has_fresh = self.pool.num_running, self.pool.has_fresh
        self._staffing.chunk_made(self._meter, running=running, has_fresh=has_fresh)

    def _fetched(self, message: ChunkFetched) -> None:
        key, counts = message.key, self._counts
        self._fetching.settle(key, has_failed=False)
        size = self._store.chunk_size(key.name, key.epoch)
        counts.num_received += min(size, self._lengths[key.name] - key.chunk * size)
        counts.received_bytes += message.nbytes
        counts.link_bytes_per_s = max(counts.link_bytes_per_s, message.nbytes / message.seconds)
        self._store.produced(key, message.nbytes)

    def _note_repetition(self, message: ChunkProduced) -> None:
        key = message.key
        size = self._store.chunk_size(key.name, key.epoch)
        num_chunks = count_chunks(self._lengths[key.name], size)
        made = self._made.setdefault((key.name, key.epoch, size), bytearray(num_chunks))
        again, made[key.chunk] = made[key.chunk], True
        if again:
            self._counts.repeated += message.num_samples
            self.notices.repeated(key.name)

    def _lost(self, key: ChunkKey | None) -> None:
        if key is not None and self._sizing.is_measuring(key.name):
            if (guess := self._sizing.lost(key)) is not None:
                self._set_size(guess)
        elif key is not None and not self._fetching.settle(key, has_failed=True):
            self._decoded.publish(key, key.name, ())
            error = ChunkError(summary=_DIED.format(name=key.name))
            self._store.lost(key, error)
        self._on_idle()
