"""How chunks get made: measures data sets, orders from preprocessors, reads their answers."""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from optuna_fleet.exceptions import ProtocolError
from optuna_fleet.pipeline import limits
from optuna_fleet.pipeline.chunks.memory_files import file_bytes
from optuna_fleet.pipeline.exchange import Exchange, ExchangeConfig, Inlets
from optuna_fleet.pipeline.messages import (
    ChunkError,
    ChunkNotProduced,
    ChunkOutgrew,
    ChunkProduced,
    DiskFailed,
    MeasureSample,
    ProduceChunk,
    SampleMeasured,
)
from optuna_fleet.pipeline.server.autoscaler import Autoscaler
from optuna_fleet.pipeline.server.decoded import DecodedStore
from optuna_fleet.pipeline.server.instructions import Instruction, Produce
from optuna_fleet.pipeline.server.notices import Notices
from optuna_fleet.pipeline.server.store import MAX_DEATHS, ChunkStore
from optuna_fleet.pipeline.server.workers import PreprocessorPool, Spawn
from optuna_fleet.pipeline.spec import ChunkKey, PipelineSpec, choose_chunk_size, count_chunks
from optuna_fleet.pipeline.stats import Counts
from optuna_fleet.settings import Settings

HEADER_SPARE_BYTES = 1024
"""Room for what a chunk's header holds beyond that of a single sample."""


_DIED = (
    "Preprocessors died over a chunk of data set {name!r}: killed, out of memory, a crash in "
    "native code, or stuck in it for too long."
)
_NO_DESCRIPTOR = (
    "The process that serves the pipeline has too many open files to be given a chunk of data set "
    "{name!r}: raise the limit (ulimit -Hn)."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlets:
    """Whom production tells what has happened.

    Attributes:
        carry_out: Given the instructions that follow from it.
        keep: Given the file of a chunk that is there now; before the instructions.
        measured: Given the name of a data set whose chunk size is known now.
        notify: Given a sentence for the user.
    """

    carry_out: Callable[[list[Instruction]], None]
    keep: Callable[[ChunkKey, int], None]
    measured: Callable[[str], None]
    notify: Callable[[str], None]


class Production:
    """Has chunks made by preprocessors, from the decoded store where it helps.

    Args:
        payload: The data sets (``SharedPipeline.payload()``).
        spec: Their description.
        settings: What the script's process is set to.
        budgets: What it may take.
        store: The chunk store, which is told of all results.
        counts: Where to count.
        spawn: Starts a child process.
        selector: The agent's selector.
        close_in_child: Called first in each preprocessor.
        outlets: Whom to tell.
        clock: Seconds since any time.
        exchange: How to share chunks with other nodes.
    """

    def __init__(
        self,
        *,
        payload: bytes,
        spec: PipelineSpec,
        settings: Settings,
        budgets: limits.Budgets,
        store: ChunkStore,
        counts: Counts,
        spawn: Spawn,
        selector: selectors.BaseSelector,
        close_in_child: Callable[[], None],
        outlets: Outlets,
        clock: Callable[[], float] = time.monotonic,
        exchange: ExchangeConfig | None = None,
    ) -> None:
        self._payload = payload
        self._spec = spec
        self._settings = settings
        self._budgets = budgets
        self._store = store
        self._counts = counts
        self._outlets = outlets
        self._close_in_child = close_in_child
        self._lengths = {dataset.name: dataset.num_samples for dataset in spec.datasets}
        self._decoded = DecodedStore(self._lengths, budgets.decoded_bytes)
        self._chunk_sizes: dict[str, int] = {}
        self._recurring: set[str] = set()
        self._prepared_bytes: dict[str, int] = {}
        self._mistrusted: set[str] = set()
        self._shared_bytes = budgets.memory_bytes
        self._to_measure: dict[str, ChunkKey] = {}
        self._measuring: set[str] = set()
        self._deaths: Counter[str] = Counter()
        # By data set and epoch, which of its chunks were made: a byte each, as there may be many.
        self._made: dict[tuple[str, int], bytearray] = {}
        self._notices = Notices(outlets.notify, budgets, spec)
        self.pool = PreprocessorPool(
            limit=budgets.num_preprocessors,
            spawn=spawn,
            main=self._preprocessor_main,
            selector=selector,
            on_message=self._received,
            on_lost=self._lost,
            on_unstarted=self._notices.unstarted,
            clock=clock,
        )
        self.autoscaler = Autoscaler(self.pool, store, budgets, clock)
        self._unsized: dict[str, SampleMeasured] = {}
        self._unfetched: deque[Produce] = deque()
        self.exchange = Exchange(
            exchange,
            spec=spec,
            inlets=Inlets(
                fetched=self._fetched,
                outgrew=store.outgrew,
                unfetched=self._unfetched.append,
                sized=self._sized,
                changed=self.work,
            ),
            room_bytes=budgets.memory_bytes // 8,
        )

    @property
    def decoded_bytes(self) -> int:
        """Bytes that the decoded store takes."""
        return self._decoded.used_bytes

    def chunk_size(self, name: str) -> int | None:
        """Returns the number of samples per chunk; None before it was measured."""
        return self._chunk_sizes.get(name)

    def expect_more(self, name: str) -> None:
        """There will be several epochs of this data set: the first fills the decoded store."""
        self._recurring.add(name)
        self._use_decoded(name)

    def _use_decoded(self, name: str) -> None:
        known = name in self._recurring and name in self._prepared_bytes
        if (
            known
            and name not in self._mistrusted
            and self._budgets.decoded_bytes
            and not self._decoded.serves(name)
        ):
            self._decoded.serve(name, self._prepared_bytes[name])
            self._share_memory()

    def _share_memory(self) -> None:
        """Chunks may take what the decoded store does not, as far as its samples are known."""
        left = self._budgets.memory_bytes - self._decoded.wanted_bytes
        if left != self._shared_bytes:
            self._shared_bytes = left
            self._outlets.carry_out(self._store.set_budget("memory", left))

    def measure(self, name: str, epoch: int) -> None:
        """Has the chunk size of a data set found out, from a sample of this epoch."""
        if name not in self._measuring:
            self._to_measure.setdefault(name, ChunkKey(name, epoch, 0))

    def work(self) -> None:
        """Gives preprocessors work, of whom there may be more or fewer from now on."""
        self._give_work()
        if self.autoscaler.review(num_measuring=len(self._measuring)):
            self._give_work()

    def _give_work(self) -> None:
        """Gives preprocessors work while there is any that fits."""
        while self._to_measure and self.pool.has_room():
            name, key = self._to_measure.popitem()
            self._measuring.add(name)
            self.pool.give(MeasureSample(key=key))
        while self._unfetched and self.pool.has_room():
            self._make(self._unfetched.popleft())
        while self.pool.has_room() or self.exchange.has_room():
            instructions = self._store.assign(self._accepts)
            self._outlets.carry_out(instructions)
            if not any(isinstance(instruction, Produce) for instruction in instructions):
                return

    def order(self, produce: Produce) -> None:
        """Has a chunk made here, or fetched from the node that makes it."""
        node = self.exchange.source(produce.key)
        if node is None:
            self._make(produce)
            return
        size = self._chunk_sizes[produce.key.name]
        spill_dir = self._budgets.spill_dir
        self.exchange.fetch(produce, node=node, chunk_size=size, spill_dir=spill_dir)

    def _make(self, produce: Produce) -> None:
        key = produce.key
        size = self._chunk_sizes[key.name]
        split = self._decoded.serves(key.name)
        self.pool.give(
            ProduceChunk(
                key=key,
                chunk_size=size,
                max_bytes=produce.max_bytes,
                place=produce.place,
                split=split,
                extents=tuple(self._lend(key, size)) if split else (),
            )
        )

    def close(self) -> None:
        """Ends the preprocessors and frees the decoded store."""
        self.exchange.close()
        self.pool.close()
        self._decoded.close()

    def close_in_child(self) -> None:
        """Closes what any forked child inherited."""
        self.exchange.close_in_child()
        for channel in self.pool.channels:
            channel.close_in_child()

    def close_decoded(self) -> None:
        """Closes the decoded store, in a child that does not preprocess."""
        self._decoded.close()

    def _accepts(self, key: ChunkKey) -> bool:
        """Whether somebody is free to make this chunk."""
        node = self.exchange.source(key)
        return self.pool.has_room() if node is None else self.exchange.has_room(node)

    def _lend(self, key: ChunkKey, size: int) -> list[tuple[int, int]]:
        room = self._budgets.memory_bytes - self._decoded.used_bytes - self._store.planned_bytes()
        lent = self._decoded.lend(key, key.name, size, max(0, room))
        self._share_memory()  # it may take more than was foreseen, where samples are unlike
        return lent

    def _preprocessor_main(self, sock: socket.socket) -> None:
        self._close_in_child()
        os.nice(self._budgets.niceness)
        # Imported in the child: the agent itself never uses torch.
        from optuna_fleet.pipeline.preprocessor.decoded_samples import DecodedSamples
        from optuna_fleet.pipeline.preprocessor.main import preprocessor_main

        preprocessor_main(
            sock,
            payload=self._payload,
            spec=self._spec,
            settings=self._settings,
            budgets=self._budgets,
            decoded=DecodedSamples(self._decoded.file, self._decoded.table, self._lengths),
        )

    # What preprocessors say

    def _received(self, message: object, fd: int | None) -> None:
        match message:
            case SampleMeasured():
                self._measured(message)
            case ChunkProduced() if fd is None:
                self._lost(message.key, _NO_DESCRIPTOR)
            case ChunkProduced():
                assert fd is not None
                self._produced(message, fd)
            case ChunkOutgrew():
                self._decoded.publish(message.key, message.key.name, ())
                self._store.outgrew(message.key, message.nbytes)
            case DiskFailed():
                self._disk_failed(message)
            case ChunkNotProduced():
                self._decoded.publish(message.key, message.key.name, ())
                self._outlets.carry_out(self._store.failed(message.key, message.error))
            case _:
                raise ProtocolError(f"A preprocessor sent an unexpected {message!r}.")
        self.work()

    def _measured(self, message: SampleMeasured) -> None:
        name = message.key.name
        if self.exchange.ask_size(name):
            self._unsized[name] = message
            return
        size = choose_chunk_size(
            num_samples=self._lengths[name],
            sample_bytes=message.sample_bytes,
            chunk_bytes=self._budgets.chunk_bytes,
            sample_s=message.sample_s,
        )
        self._set_size(message, size)

    def _sized(self, name: str, size: int | None) -> None:
        """Another node said how many samples make a chunk, or is not there to say it."""
        message = self._unsized.pop(name)
        if size is None:
            self._measured(message)
        else:
            self._set_size(message, size)

    def _set_size(self, message: SampleMeasured, size: int) -> None:
        name = message.key.name
        num_samples = self._lengths[name]
        self._measuring.discard(name)
        self._chunk_sizes[name] = size
        content = size * message.sample_bytes + message.header_bytes + HEADER_SPARE_BYTES
        num_chunks = count_chunks(num_samples, size)
        self._store.set_size(name, num_chunks=num_chunks, chunk_bytes=file_bytes(content))
        if message.prepared_bytes is not None:
            self._prepared_bytes[name] = message.prepared_bytes
            self._use_decoded(name)
        self._outlets.measured(name)

    def _produced(self, message: ChunkProduced, fd: int) -> None:
        key, counts = message.key, self._counts
        counts.preprocessed += message.num_samples
        counts.busy_s += message.busy_s
        self.autoscaler.count(key.name, message.num_samples, message.busy_s)
        counts.num_loaded += message.num_loaded
        self._notices.count(key.name, message.num_samples, message.busy_s)
        num_chunks = count_chunks(self._lengths[key.name], self._chunk_sizes[key.name])
        made = self._made.setdefault((key.name, key.epoch), bytearray(num_chunks))
        again, made[key.chunk] = made[key.chunk], True
        if again:
            counts.repeated += message.num_samples
            self._notices.repeated(key.name)
        if message.complaint is not None:
            counts.num_skipped += len(message.skipped)
            self._notices.skipped(key.name, message.skipped, message.complaint)
        self._decoded.publish(key, key.name, message.stored)
        if message.mismatch is not None:
            self._mistrusted.add(key.name)
            self._decoded.stop(key.name)
            self._notices.mismatch(key.name, message.mismatch)
        is_whole = message.num_loaded + len(message.stored) >= message.num_samples
        if self._decoded.is_full and self._decoded.serves(key.name) and not is_whole:
            self._notices.decoded_full(key.name, self._decoded.fitting_share(key.name))
        nbytes = os.fstat(fd).st_size
        self.exchange.preprocessed(
            num_samples=message.num_samples,
            busy_s=message.busy_s,
            nbytes=nbytes,
            workers=self._budgets.num_preprocessors,
        )
        self._outlets.keep(key, fd)
        self._outlets.carry_out(self._store.produced(key, nbytes))

    def _fetched(self, key: ChunkKey, fd: int) -> None:
        start = key.chunk * self._chunk_sizes[key.name]
        stop = min(start + self._chunk_sizes[key.name], self._lengths[key.name])
        self._counts.received += stop - start
        self._outlets.keep(key, fd)
        self._outlets.carry_out(self._store.produced(key, os.fstat(fd).st_size))

    def _disk_failed(self, message: DiskFailed) -> None:
        self._decoded.publish(message.key, message.key.name, ())
        self._notices.disk_failed(message.reason)
        self._outlets.carry_out(self._store.disk_failed(message.key))

    def _lost(self, key: ChunkKey | None, why: str = _DIED) -> None:
        if key is not None and key.name in self._measuring:
            self._lost_measuring(key)
        elif key is not None:
            self._decoded.publish(key, key.name, ())
            error = ChunkError(summary=why.format(name=key.name))
            self._outlets.carry_out(self._store.lost(key, error))
        self.work()

    def _lost_measuring(self, key: ChunkKey) -> None:
        self._measuring.discard(key.name)
        self._deaths[key.name] += 1
        if self._deaths[key.name] < MAX_DEATHS:
            self._to_measure[key.name] = key
            return
        # Nobody will tell the size now. Guess, so that readers get to hear of the failure.
        guess = limits.guess_sample_bytes(self._budgets.chunk_bytes)
        self._measured(SampleMeasured(key=key, sample_bytes=guess, header_bytes=0))
