"""How chunks get made: measures data sets, orders from preprocessors, reads their answers."""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from optuna_fleet.exceptions import ProtocolError
from optuna_fleet.pipeline import limits
from optuna_fleet.pipeline.chunks.arena import Arena
from optuna_fleet.pipeline.exchange.peers import Asking, Peers
from optuna_fleet.pipeline.exchange.plan import Peer
from optuna_fleet.pipeline.messages import (
    ChunkError,
    ChunkFetched,
    ChunkNotFetched,
    ChunkNotProduced,
    ChunkOutgrew,
    ChunkProduced,
    ProduceChunk,
    SampleMeasured,
)
from optuna_fleet.pipeline.packed import PipelineSetup
from optuna_fleet.pipeline.preprocessor.decoded import DecodedStore
from optuna_fleet.pipeline.preprocessor.order_file import order_files
from optuna_fleet.pipeline.server.allocator import Space
from optuna_fleet.pipeline.server.epochs import Order
from optuna_fleet.pipeline.server.fetching import NUM_FETCHERS, Fetching
from optuna_fleet.pipeline.server.notices import Notices
from optuna_fleet.pipeline.server.sizing import Sizing
from optuna_fleet.pipeline.server.staffing import Levels, Meter, Staffing
from optuna_fleet.pipeline.server.store import ChunkStore
from optuna_fleet.pipeline.server.workers import PreprocessorPool, Spawn
from optuna_fleet.pipeline.spec import ChunkKey
from optuna_fleet.pipeline.stats import PipelineStats

_LOOK_S = 0.02
"""The queues are looked at no more often: that costs time for each reader."""

_DIED = (
    "Preprocessors died over a chunk of data set {name!r}: killed, out of memory, a crash in "
    "native code, or stuck in it for too long."
)


class Production:
    """Has chunks made by preprocessors, from the decoded store where it helps.

    ``on_idle`` is called when there is one more who could work, or something new to do: to `work`.

    Attributes:
        chunk_bytes: Size of a chunk to aim at.
        sizing: How data sets are cut into chunks.
        arena: Where chunks and decoded samples lie.
        store: The chunk store, which is told of all results.
        counts: What was done.
        pools: The preprocessors, those who read streams, and those who ask other nodes.
        notices: What the user is to be told.
    """

    def __init__(
        self,
        setup: PipelineSetup,
        *,
        spawn: Spawn,
        selector: selectors.BaseSelector,
        close_in_child: Callable[[], None],
        on_idle: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        peers: Peers | None = None,
    ) -> None:
        assert setup.payload is not None
        self._setup = setup
        self._payload = setup.payload
        spec, nbytes = setup.spec, limits.budget(setup.memory_bytes, setup.spill_dir)
        self.chunk_bytes = setup.chunk_bytes or limits.default_chunk_bytes(nbytes)
        self.counts = PipelineStats()
        self.notices = Notices(nbytes, spec)
        self.arena = Arena(nbytes, setup.spill_dir)
        self._orders = order_files(spec)
        kept = {dataset.name: dataset.length for dataset in spec.datasets if dataset.kept}
        self._space = Space(nbytes - (nbytes // limits.DECODED_PART if kept else 0))
        self._decoded = DecodedStore(self.arena, self._space.nbytes, kept)
        self.store = ChunkStore(
            self._space,
            window=2 * (setup.num_alone or setup.num_preprocessors) + 2,
            fixed=[dataset.name for dataset in spec.datasets if not dataset.shuffled],
        )
        self.sizing = Sizing(spec, self.store, self.chunk_bytes, peers)
        # By data set and epoch, which chunks were made: there may be many.
        self._made: dict[tuple[str, int], bytearray] = {}
        self._clock = clock
        self._on_idle = on_idle
        self._close_in_child = close_in_child
        new_pool = partial(
            PreprocessorPool,
            spawn=spawn,
            main=self._preprocessor_main,
            selector=selector,
            on_message=self._received,
            on_lost=self._lost,
            on_idle=on_idle,
            on_unstarted=self.notices.unstarted,
            clock=clock,
        )
        self.pool, fetchers = new_pool(limit=setup.num_preprocessors), new_pool(limit=NUM_FETCHERS)
        # A stream is read by one process: another one would have to begin at its start.
        self._streams = {each.name: new_pool(limit=1) for each in spec.datasets if each.shards}
        self._makers = [self.pool, *self._streams.values()]
        self.pools = [*self._makers, fetchers]
        self._peers = peers
        self._fetching = Fetching(peers, fetchers, self._space)
        self._staffing = Staffing(setup.num_preprocessors, is_adaptive=setup.is_adaptive)
        self._meter = Meter(clock())
        self._looked_s = float("-inf")
        self._ready = (0, 0)

    def stats(self) -> PipelineStats:
        """Returns what was done so far."""
        self._meter.advance(self._clock())
        return replace(
            self.counts,
            resident_bytes=self._resident_bytes(),
            lent_bytes=self.store.residents.lent_bytes,
            decoded_bytes=self._decoded.used_bytes,
            num_dropped=self.store.residents.num_dropped,
            num_lost=sum(pool.num_lost for pool in self.pools),
            use=replace(self._meter.use),
        )

    def work(self) -> None:
        """Gives preprocessors work while there is any that fits."""
        self._meter.advance(self._clock())
        self.pool.target = self._staffing.number
        for name in self.sizing.wanted:
            if (pool := self._pool_for(name)).has_room():
                pool.give(self.sizing.order(name))
        while self._fetching.has_room() or any(pool.has_room() for pool in self._makers):
            is_any = not (self._peers or self._setup.num_alone or self._streams)
            order = self.store.assign(None if is_any else self._accepts)
            if order is None:
                break
            self._give(order)
        self._look()
        self.counts.peak_bytes = max(self.counts.peak_bytes, self._resident_bytes())

    def resume(self) -> None:
        """Tries again what could not be done; to be called now and then, before `work`."""
        for pool in self.pools:
            reads_on = pool in self._streams.values()
            pool.resume(end_idle=self._setup.is_adaptive and not reads_on)
        self._staffing.ended(self.pool.num_running)

    def _pool_for(self, name: str) -> PreprocessorPool:
        return self._streams.get(name, self.pool)

    def _source(self, key: ChunkKey) -> Peer | None:
        return self._fetching.source(key, self.store.order_bytes(key))

    def _accepts(self, key: ChunkKey) -> bool:
        """Whether somebody is free to make this chunk, or to fetch it."""
        most = self._setup.num_alone
        if key.owner is not None and most and self.store.num_producing(key.owner) >= most:
            return False
        makers = self._pool_for(key.name)
        return (makers if self._source(key) is None else self._fetching).has_room()

    def _give(self, order: Order) -> None:
        key, address, max_bytes = order
        size, source = self.store.size(key.name).chunk_size, self._source(key)
        work = ProduceChunk(
            key=key,
            chunk_size=size,
            address=address,
            max_bytes=max_bytes,
            source=source,
        )
        (self._pool_for(key.name) if source is None else self._fetching).give(work)

    def close(self) -> None:
        """Ends the preprocessors, and frees all memory."""
        for pool in self.pools:
            pool.close()
        self.close_files()

    def close_files(self) -> None:
        """Lets go of the memory, also in a child that does not preprocess."""
        self._payload.close()
        for orders in self._orders.values():
            orders.close()
        self._decoded.close()
        self.arena.close()

    def close_in_child(self) -> None:
        """Closes what any forked child inherited."""
        for pool in self.pools:
            for channel in pool.channels:
                channel.close_in_child()

    def _look(self) -> None:
        """Notes what is so until the next event."""
        meter, store = self._meter, self.store
        if meter.now_s - self._looked_s >= _LOOK_S:
            self._ready, self._looked_s = store.ready(), meter.now_s
        meter.levels = Levels(
            running=sum(pool.num_running for pool in self._makers),
            busy=sum(pool.num_busy for pool in self._makers),
            is_blocked=store.has_work and not self._setup.num_alone,
            reading=len(store.passes) + self.sizing.num_measuring,
            stalled=store.num_stalled + self.sizing.num_measuring,
            ready=self._ready[0],
            window=self._ready[1],
        )

    def _preprocessor_main(self, sock: socket.socket) -> None:
        self._close_in_child()
        setup, peers = self._setup, self._peers
        os.nice(setup.niceness)
        # Imported in the child: the agent itself never uses torch.
        from optuna_fleet.pipeline.preprocessor.main import preprocessor_main

        preprocessor_main(
            sock,
            load=lambda: replace(self._payload.load(), orders=self._orders),
            spec=setup.spec,
            settings=setup.settings,
            chunk_bytes=self.chunk_bytes,
            arena=self.arena,
            decoded=self._decoded,
            asking=Asking(peers.credentials, peers.patience_s) if peers is not None else None,
        )

    def _resident_bytes(self) -> int:
        return self._space.used + self._decoded.used_bytes

    # What preprocessors say

    def _received(self, message: object) -> None:
        match message:
            case ChunkFetched():
                self._fetched(message)
            case ChunkNotFetched(key=key, is_gone=is_gone):
                self._fetching.failed(key, is_gone=is_gone)
                self.store.end_order(key)
            case SampleMeasured():
                self._set_size(message)
            case ChunkProduced():
                self._produced(message)
            case ChunkOutgrew(key=key, nbytes=nbytes):
                self._fetching.settle(key)
                self.store.outgrew(key, nbytes)
            case ChunkNotProduced(key=key, error=error):
                self._fetching.settle(key)
                self.store.failed(key, error)
            case _:
                raise ProtocolError(f"A preprocessor sent an unexpected {message!r}.")

    def _set_size(self, message: SampleMeasured) -> None:
        if not message.is_repeatable:
            self.notices.unseeded(message.key.name)
        self.sizing.measured(message)

    def _produced(self, message: ChunkProduced) -> None:
        key, counts = message.key, self.counts
        self._fetching.settle(key)
        counts.preprocessed += message.num_samples
        counts.busy_s += message.busy_s
        counts.num_loaded += message.num_loaded
        self.notices.count(key.name, message.num_samples, message.busy_s)
        self._note_repetition(message)
        if message.complaint is not None:
            counts.num_skipped += len(message.skipped)
            self.notices.skipped(key.name, message.skipped, message.complaint)
        if self._decoded.is_full and self._decoded.serves(key.name):
            self.notices.decoded_full(key.name, partial(self._decoded.kept_share, key.name))
        self.store.produced(key, message.nbytes)
        self._meter.advance(self._clock())
        running, has_fresh = self.pool.num_running, self.pool.has_fresh
        self._staffing.chunk_made(self._meter.use, running=running, has_fresh=has_fresh)

    def _fetched(self, message: ChunkFetched) -> None:
        key, counts = message.key, self.counts
        self._fetching.settle(key)
        size = self.store.size(key.name).chunk_size
        num_samples = self._setup.spec.dataset(key.name).num_samples
        counts.num_received += min(size, num_samples - key.chunk * size)
        self.store.produced(key, message.nbytes)

    def _note_repetition(self, message: ChunkProduced) -> None:
        key = message.key
        if key.owner is not None:
            return  # each of its passes is
        num_chunks = self.store.size(key.name).num_chunks
        made = self._made.setdefault((key.name, key.epoch), bytearray(num_chunks))
        again, made[key.chunk] = made[key.chunk], True
        if again:
            self.counts.repeated += message.num_samples
            self.notices.repeated(key.name)

    def _lost(self, key: ChunkKey | None) -> None:
        if key is not None and self.sizing.is_measuring(key.name):
            if (guess := self.sizing.lost(key)) is not None:
                self._set_size(guess)
        elif key is not None and self._fetching.failed(key):
            self.store.end_order(key)
        elif key is not None:
            error = ChunkError(summary=_DIED.format(name=key.name))
            self.store.lost(key, error)
        self._on_idle()
