"""How chunks get made: measures data sets, orders from preprocessors, reads their answers."""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from optuna_fleet.exceptions import ProtocolError
from optuna_fleet.pipeline import limits
from optuna_fleet.pipeline.chunks.arena import Arena
from optuna_fleet.pipeline.exchange import Asking, Peer, Peers
from optuna_fleet.pipeline.pipeline_messages import (
    ChunkError,
    ChunkNotFetched,
    ChunkNotProduced,
    ChunkOutgrew,
    ChunkProduced,
    MeasureSample,
    PipelineStats,
    ProduceChunk,
    SampleMeasured,
)
from optuna_fleet.pipeline.preprocessor.decoded import DecodedStore
from optuna_fleet.pipeline.preprocessor.payload import PipelineSetup
from optuna_fleet.pipeline.server.scheduler import MAX_DEATHS, Scheduler, Size, Space
from optuna_fleet.pipeline.server.workers import FETCHER, MAKER, Kind, Spawn, Work, Workers
from optuna_fleet.pipeline.spec import ChunkKey, EpochKey, choose_chunk_size
from optuna_fleet.pipeline.wire import close_ports_in_child

NUM_FETCHERS = 4
"""Chunks that are asked of other nodes at a time; who waits for one is no preprocessor."""

FETCHED_SHARE = 1 / 8
"""Part of the memory for chunks that these may take: the rest is for what others wait for."""

HEADER_SPARE_BYTES = 1024
"""Room for what a chunk's header holds beyond that of a single sample."""

STAFFING_S = 0.5
"""Starting a process takes time too: how many there are is decided no faster than this."""

STARVED = 0.1
"""Readers wait too often if they do so for this share of their time."""

SATURATED = 0.85
"""More preprocessors can only help if those there are were busy for this share of the time."""

_MOST_NAMED = 10  # samples that were skipped

_DIED = (
    "Preprocessors died over a chunk of data set {name!r}: killed, out of memory, a crash in "
    "native code, or stuck in it for too long."
)
_SKIPPED = (
    "Skipped sample(s) {named} of data set {name!r}; others take their places. More of them are "
    "only counted. {complaint}"
)
_REPEATED = (
    "The preprocessed epochs of data set {name!r} that are in use do not fit into {mib} MiB: what "
    "was dropped is preprocessed again. A larger memory_bytes, or a spill_dir with more room, "
    "would avoid that."
)
_DECODED_FULL = (
    "The decoded store, with {mib} MiB, has no room for all samples of data set {name!r}. The "
    "others are read and decoded in every epoch. A larger memory_bytes, of which it has a part, "
    "would avoid that."
)
_UNSEEDED = (
    "A sample of data set {name!r} came out otherwise when it was made again, so that no seed "
    "repeats the results: take random numbers from torch's, NumPy's or Python's global functions, "
    "or from a generator that each __getitem__ makes anew, as by "
    "np.random.default_rng(torch.initial_seed()), and keep nothing that changes from one sample "
    "to the next."
)
_UNMEASURED = (
    "The first samples of data set {name!r} could not be made on this node, so that their size is "
    "guessed. Nodes that could make them share none of its samples with this one."
)
_UNSTARTED = (
    "A preprocessor can't be started ({error}); this is tried again. See the limits on processes "
    "and open files: ulimit -u, ulimit -n, pids.max of the control group."
)


class Making:
    """Has chunks made as the scheduler says, here or by other nodes.

    ``on_idle`` is called when there is one more who could work, or something new to do: to `work`.

    Attributes:
        chunk_bytes: Size of a chunk to aim at.
        arena: Where chunks and decoded samples lie.
        scheduler: It is told of all results.
        counts: What was done.
        workers: The preprocessors, those who read streams, and those who ask other nodes.
        notices: Sentences for the user; the server empties it.
    """

    def __init__(
        self,
        setup: PipelineSetup,
        *,
        spawn: Spawn,
        selector: selectors.BaseSelector,
        on_idle: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        peers: Peers | None = None,
    ) -> None:
        assert setup.payload is not None
        self._setup, self._payload, self._peers = setup, setup.payload, peers
        self._selector, self._on_idle, self._clock = selector, on_idle, clock
        spec, nbytes = setup.spec, limits.budget(setup.memory_bytes, setup.spill_dir)
        kept = {dataset.name: dataset.length for dataset in spec.datasets if dataset.kept}
        self._space = Space(nbytes - (nbytes // limits.DECODED_PART if kept else 0))
        self.scheduler = Scheduler(
            self._space,
            window=2 * (setup.num_alone or setup.num_preprocessors) + 2,
            fixed=[dataset.name for dataset in spec.datasets if not dataset.shuffled],
        )
        self.chunk_bytes = setup.chunk_bytes or limits.default_chunk_bytes(setup.memory_bytes)
        self.counts = PipelineStats()
        self.notices: list[str] = []
        self._told: set[tuple[str, str]] = set()
        self.arena = Arena(nbytes, setup.spill_dir)
        self._decoded = DecodedStore(self.arena, self._space.nbytes, kept)
        self._num_wanted = 1 if setup.is_adaptive else setup.num_preprocessors
        # A stream is read by one process: another one would have to begin at its start.
        self._streams = {each.name: ("stream", each.name) for each in spec.datasets if each.shards}
        self._makers = [MAKER, *self._streams.values()]
        self.workers = Workers(
            limit=lambda kind: {MAKER: self._num_wanted, FETCHER: NUM_FETCHERS}.get(kind, 1),
            spawn=spawn,
            main=self._preprocessor_main,
            selector=selector,
            on_message=self._received,
            on_lost=self._lost,
            on_idle=on_idle,
            on_unstarted=lambda error: self._tell(_UNSTARTED, error=error),
            clock=clock,
        )
        self._fetched: dict[ChunkKey, ProduceChunk] = {}  # the orders of those being fetched
        self._unfetched: set[ChunkKey] = set()  # that did not come
        self._unmeasured: set[str] = set()
        self._measuring: set[str] = set()
        self._num_unmeasured: Counter[str] = Counter()  # how often that failed
        self._made: dict[EpochKey, bytearray] = {}  # which chunks were: there may be many
        self._counted_s, self._per_s = clock(), dict[str, float]()  # since when it is so
        self._judged = replace(self.counts)

    def stats(self) -> PipelineStats:
        """Returns what was done so far."""
        self._count_time()
        return replace(
            self.counts,
            resident_bytes=self._resident_bytes(),
            lent_bytes=self.scheduler.lent_bytes,
            decoded_bytes=self._decoded.used_bytes,
            num_dropped=self.scheduler.num_dropped,
            num_lost=self.workers.num_lost,
        )

    def knows(self, name: str) -> bool:
        """Returns whether it is known how to cut a data set; if not, that is found out."""
        is_known = name in self.scheduler.sizes
        if not (is_known or name in self._measuring):
            self._unmeasured.add(name)
        return is_known

    def work(self) -> None:
        """Gives preprocessors work while there is any that fits."""
        self._count_time()
        for name in sorted(self._unmeasured):
            if self.workers.has_room(kind := self._kind(name)):
                self._unmeasured.remove(name)
                self._measuring.add(name)
                self.workers.give(kind, MeasureSample(name=name))
        while self._can_fetch() or any(map(self.workers.has_room, self._makers)):
            if (order := self.scheduler.assign(self._accepts)) is None:
                break
            if (source := self._source(order.key)) is None:
                self.workers.give(self._kind(order.key.name), order)
            else:
                self._fetched[order.key] = order = replace(order, source=source)
                self.workers.give(FETCHER, order)
        self._per_s = self._use_per_s()
        self.counts.peak_bytes = max(self.counts.peak_bytes, self._resident_bytes())

    def resume(self) -> None:
        """Tries again what could not be done; to be called now and then, before `work`."""
        is_adaptive = self._setup.is_adaptive
        # Who reads a stream is not ended: another one would have to begin at its start.
        self.workers.resume(ending=(MAKER, FETCHER) if is_adaptive else ())
        if is_adaptive:
            self._num_wanted = min(self._num_wanted, max(1, self.workers.num_running(MAKER)))

    def close(self) -> None:
        """Ends the preprocessors, and frees all memory."""
        self.workers.close()
        self.close_files()

    def close_files(self) -> None:
        """Lets go of the memory, also in a child that does not preprocess."""
        self._payload.close()
        self._decoded.close()
        self.arena.close()

    def _kind(self, name: str) -> Kind:
        """Who makes the chunks of a data set."""
        return self._streams.get(name, MAKER)

    def _source(self, key: ChunkKey) -> Peer | None:
        """Whom to ask for a chunk; None if it is to be made here.

        So it is where memory is so short that nodes could wait for each other's.
        """
        is_large = self.scheduler.order_bytes(key.name) > FETCHED_SHARE * self._space.nbytes
        if self._peers is None or is_large or key in self._unfetched:
            return None
        return self._peers.source(key)

    def _can_fetch(self) -> bool:
        if self._peers is None or not (
            self._peers.plan.is_shared and self.workers.has_room(FETCHER)
        ):
            return False
        taken = sum(work.max_bytes for work in self._fetched.values())
        return taken < FETCHED_SHARE * self._space.nbytes

    def _accepts(self, key: ChunkKey) -> bool:
        """Whether somebody is free to make this chunk, or to fetch it."""
        most = self._setup.num_alone
        if key.owner is not None and most and self.scheduler.num_making(key.owner) >= most:
            return False
        is_made_here = self._source(key) is None
        return self.workers.has_room(self._kind(key.name)) if is_made_here else self._can_fetch()

    def _count_time(self) -> None:
        """Adds the time since the last event; when nobody reads, it does not count."""
        passed_s = max(0.0, self._clock() - self._counted_s)
        self._counted_s += passed_s
        for name, rate in self._per_s.items():
            setattr(self.counts, name, getattr(self.counts, name) + rate * passed_s)

    def _use_per_s(self) -> dict[str, float]:
        """What is so until the next event, by the name of what counts it."""
        scheduler, num_measuring = self.scheduler, len(self._measuring)
        if not (reading := len(scheduler.passes) + num_measuring):
            return {}
        running = sum(map(self.workers.num_running, self._makers))
        busy = sum(map(self.workers.num_busy, self._makers))
        return {
            "active_s": 1,
            "running_s": running,
            "busy_s": busy,
            "blocked_s": running - busy if scheduler.is_blocked else 0,
            "reading_s": reading,
            "stalled_s": len(scheduler.stalled) + num_measuring,
        }

    def _staff(self) -> None:
        """A chunk was made: twice as many work if readers have waited though all were at work.

        That is not judged while some still load the data sets. Who is idle for long is ended.
        """
        self._count_time()
        since = self.counts.since(self._judged)
        if self.workers.has_fresh(MAKER):
            self._judged = replace(self.counts)
        elif self._setup.is_adaptive and since.active_s >= STAFFING_S:
            self._judged = replace(self.counts)
            busy_share = since.busy_s / (self._num_wanted * since.active_s)
            if busy_share >= SATURATED and since.stalled_share >= STARVED:
                self._num_wanted = min(2 * self._num_wanted, self._setup.num_preprocessors)

    def _preprocessor_main(self, sock: socket.socket) -> None:
        close_ports_in_child(self._selector)
        setup, peers = self._setup, self._peers
        os.nice(setup.niceness)
        # Imported in the child: the agent itself never uses torch.
        from optuna_fleet.pipeline.preprocessor.preprocessor import preprocessor_main

        preprocessor_main(
            sock,
            load=self._payload.load,
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
            case SampleMeasured():
                self._measured(message)
            case ChunkNotFetched(key=key, is_gone=is_gone):
                self._not_fetched(key, is_gone=is_gone)
            case ChunkProduced(key=key):
                if self._settle(key):
                    self.counts.num_received += message.num_samples
                else:
                    self._count(message)
                self.scheduler.produced(key, message.nbytes)
            case ChunkOutgrew(key=key, nbytes=nbytes):
                self._settle(key)
                self.scheduler.outgrew(key, nbytes)
            case ChunkNotProduced(key=key, error=error):
                self._settle(key)
                self.scheduler.failed(key, error)
            case _:
                raise ProtocolError(f"A preprocessor sent an unexpected {message!r}.")

    def _settle(self, key: ChunkKey) -> bool:
        """Nobody is at a chunk any more; returns whether it was asked of another node."""
        self._unfetched.discard(key)
        return self._fetched.pop(key, None) is not None

    def _not_fetched(self, key: ChunkKey, *, is_gone: bool = False) -> None:
        """Its owner has refused, or we died over it here, or it ``is_gone``, or slow."""
        source = self._fetched.pop(key).source
        if is_gone and source is not None and self._peers is not None:
            self._peers.leave_out(source)
        self._unfetched.add(key)
        self.scheduler.put_back(key)

    def _measured(self, message: SampleMeasured) -> None:
        name, dataset = message.name, self._setup.spec.dataset(message.name)
        self._measuring.discard(name)
        if message.has_failed:
            self._num_unmeasured[name] += 1
            if self._num_unmeasured[name] < MAX_DEATHS:
                return  # once more: nodes that guess another size share nothing of it
            if self._peers is not None and self._peers.plan.is_shared:
                self._tell(_UNMEASURED, name)
        if not message.is_repeatable:
            self._tell(_UNSEEDED, name)
        size = choose_chunk_size(
            dataset,
            sample_bytes=message.sample_bytes,
            chunk_bytes=self.chunk_bytes,
            are_rows=message.are_rows,
        )
        content = size * message.sample_bytes + message.header_bytes + HEADER_SPARE_BYTES
        self.scheduler.sizes[name] = Size(
            num_samples=dataset.num_samples, chunk_size=size, chunk_bytes=content
        )

    def _count(self, message: ChunkProduced) -> None:
        key, counts = message.key, self.counts
        counts.preprocessed += message.num_samples
        counts.num_loaded += message.num_loaded
        if key.owner is None and self._was_made(key):
            counts.repeated += message.num_samples
            self._tell(_REPEATED, key.name, mib=self.arena.nbytes >> 20)
        if message.complaint is not None:
            counts.num_skipped += len(message.skipped)
            named = [*map(str, message.skipped[:_MOST_NAMED])]
            named += ["..."] * (len(message.skipped) > _MOST_NAMED)
            complaint = message.complaint.text()
            self._tell(_SKIPPED, key.name, named=", ".join(named), complaint=complaint)
        if self._decoded.lacks(key.name):
            mib = (self.arena.nbytes - self._space.nbytes) >> 20
            self._tell(_DECODED_FULL, key.name, mib=mib)
        self._staff()

    def _tell(self, text: str, name: str = "", **more: object) -> None:
        """Says something to the user, once of each data set."""
        if (text, name) not in self._told:
            self._told.add((text, name))
            self.notices.append(text.format(name=name, **more))

    def _was_made(self, key: ChunkKey) -> bool:
        """Whether a chunk had been made before; notes that it is now."""
        num_chunks = self.scheduler.sizes[key.name].num_chunks
        made = self._made.setdefault(key.of_epoch, bytearray(num_chunks))
        was_made, made[key.chunk] = made[key.chunk], True
        return bool(was_made)

    def _lost(self, work: Work | None) -> None:
        match work:
            case MeasureSample(name=name):
                guess = limits.guess_sample_bytes(self.chunk_bytes)
                self._measured(SampleMeasured(name=name, sample_bytes=guess, has_failed=True))
            case ProduceChunk(key=key) if key in self._fetched:
                self._not_fetched(key)
            case ProduceChunk(key=key):
                self.scheduler.lost(key, ChunkError(summary=_DIED.format(name=key.name)))
        self._on_idle()
