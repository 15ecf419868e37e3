"""The agent's side of the pipeline: carries out what the chunk store decides."""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from optuna_fleet.exceptions import ProtocolError
from optuna_fleet.pipeline import limits
from optuna_fleet.pipeline.instructions import Drop, Grant, Instruction, Produce, Refuse
from optuna_fleet.pipeline.messages import (
    Advance,
    ChunkError,
    ChunkFailed,
    ChunkNotProduced,
    ChunkProduced,
    ChunkReady,
    ClosePass,
    OpenPass,
    PassOpened,
    ProduceChunk,
    SampleMeasured,
)
from optuna_fleet.pipeline.spec import ChunkKey, PipelineSpec, choose_chunk_size, count_chunks
from optuna_fleet.pipeline.stats import Counts, PipelineStats
from optuna_fleet.pipeline.store import ChunkStore
from optuna_fleet.pipeline.wire import Port
from optuna_fleet.pipeline.workers import PreprocessorPool, Spawn

PassId = tuple[Hashable, int]


@dataclass(slots=True)
class _Reader:
    channel: Port
    passes: set[int] = field(default_factory=set)


class PipelineServer:
    """Serves trainers from one chunk store, and keeps preprocessors at work. Never blocks.

    Its sockets register themselves with ``selector``, with a callable as ``data``: the agent's
    loop is ``for key, mask in selector.select(timeout): key.data(mask)``. Preprocessors are
    started when there is work for them. The soft limit on open files is raised to the hard one.

    Args:
        payload: The data sets (``SharedPipeline.payload()``).
        spec: Their description (``SharedPipeline.spec()``).
        memory_bytes: Budget of resident chunks; None for a quarter of what is available.
        num_preprocessors: Most preprocessors at a time.
        spawn: Starts a child process, see ``Spawn``.
        selector: The agent's selector.
        chunk_bytes: Size of a chunk to aim at; None to choose.
    """

    def __init__(
        self,
        *,
        payload: bytes,
        spec: PipelineSpec,
        memory_bytes: int | None,
        num_preprocessors: int,
        spawn: Spawn,
        selector: selectors.BaseSelector,
        chunk_bytes: int | None = None,
    ) -> None:
        max_chunks = limits.raise_file_limit()
        budget = limits.default_memory_bytes() if memory_bytes is None else memory_bytes
        self._payload = payload
        self._spec = spec
        self._chunk_bytes = chunk_bytes or limits.default_chunk_bytes(budget, max_chunks)
        self._selector = selector
        self._store = ChunkStore(
            memory_bytes=budget,
            max_chunks=max_chunks,
            window=2 * num_preprocessors + 2,
            fixed=[dataset.name for dataset in spec.datasets if not dataset.shuffled],
        )
        self._pool = PreprocessorPool(
            limit=num_preprocessors,
            spawn=spawn,
            main=self._preprocessor_main,
            selector=selector,
            on_message=self._from_preprocessor,
            on_lost=self._preprocessor_lost,
        )
        self._readers: dict[Hashable, _Reader] = {}
        self._files: dict[ChunkKey, int] = {}
        self._chunk_sizes: dict[str, int] = {}
        self._measuring: set[str] = set()
        self._unopened: list[tuple[Hashable, OpenPass]] = []
        self._counts = Counts()

    # For the agent

    def add_reader(self, reader_id: Hashable, sock: socket.socket) -> None:
        """Serves the trainer at the other end of ``sock``, which is the server's from now on."""
        channel = Port(
            sock,
            self._selector,
            on_message=lambda message, fd: self._from_reader(reader_id, message),
            on_close=lambda: self.remove_reader(reader_id),
        )
        self._readers[reader_id] = _Reader(channel)

    def remove_reader(self, reader_id: Hashable) -> None:
        """Forgets a trainer, dead or done; what it held is free. Harmless if it is unknown."""
        reader = self._readers.pop(reader_id, None)
        if reader is None:
            return
        reader.channel.close()
        self._unopened = [entry for entry in self._unopened if entry[0] != reader_id]
        for pass_id in reader.passes:
            self._carry_out(self._store.close_pass((reader_id, pass_id)))
        self._assign()

    def child_died(self, pid: int) -> bool:
        """Tells that a child was reaped; returns whether it was a preprocessor of this server."""
        return self._pool.child_died(pid)

    @property
    def preprocessor_pids(self) -> tuple[int, ...]:
        """Pids of the preprocessors that run."""
        return self._pool.pids

    def stats(self) -> PipelineStats:
        """Returns what was done so far."""
        return self._counts.snapshot(
            resident_bytes=self._store.resident_bytes, num_lost=self._pool.num_lost
        )

    def close(self) -> None:
        """Frees all memory and cuts everyone off.

        Preprocessors exit when they notice, trainers' reads raise. The agent reaps.
        """
        self._pool.close()
        for reader in self._readers.values():
            reader.channel.close()
        self._readers.clear()
        self._close_files()

    def close_in_child(self) -> None:
        """Closes what a forked child inherited; every trainer the agent forks must call it first.

        It would otherwise keep dropped chunks in memory and hide the death of its siblings.
        """
        for channel in self._pool.channels:
            channel.close_in_child()
        for reader in self._readers.values():
            reader.channel.close_in_child()
        self._close_files()

    def _close_files(self) -> None:
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()

    def _preprocessor_main(self, sock: socket.socket) -> None:
        self.close_in_child()
        # Imported in the child: the agent itself never uses torch.
        from optuna_fleet.pipeline.preprocessor import preprocessor_main

        preprocessor_main(
            sock, payload=self._payload, spec=self._spec, chunk_bytes=self._chunk_bytes
        )

    # From trainers

    def _from_reader(self, reader_id: Hashable, message: object) -> None:
        match message:
            case OpenPass():
                self._open(reader_id, message)
            case Advance():
                self._advance((reader_id, message.pass_id), message)
            case ClosePass():
                self._close_pass((reader_id, message.pass_id), message)
            case _:
                raise ProtocolError(f"A trainer sent the pipeline an unexpected {message!r}.")
        self._assign()

    def _open(self, reader_id: Hashable, message: OpenPass) -> None:
        size = self._chunk_sizes.get(message.name)
        if size is None:
            # How many samples make a chunk is known once one of them has been preprocessed.
            self._unopened.append((reader_id, message))
            if message.name not in self._measuring:
                self._measuring.add(message.name)
                self._store.warm(ChunkKey(message.name, message.epoch, 0))
            return
        reader = self._readers[reader_id]
        reader.passes.add(message.pass_id)
        cursor = message.start // size
        self._store.open_pass(
            (reader_id, message.pass_id),
            message.name,
            message.epoch,
            cursor,
            continues=message.continues,
        )
        reader.channel.send(PassOpened(pass_id=message.pass_id, chunk_size=size))

    def _advance(self, pass_id: PassId, message: Advance) -> None:
        self._store.move(pass_id, message.cursor)
        self._carry_out(self._store.release(pass_id, message.released))
        for chunk in message.needed:
            self._carry_out(self._store.request(pass_id, chunk, urgent=True))
        for chunk in message.ahead:
            self._carry_out(self._store.request(pass_id, chunk, urgent=False))

    def _close_pass(self, pass_id: PassId, message: ClosePass) -> None:
        self._counts.consumed += message.num_consumed
        self._counts.waited_s += message.waited_s
        passes = self._readers[pass_id[0]].passes
        if message.pass_id in passes:
            passes.remove(message.pass_id)
            self._carry_out(self._store.close_pass(pass_id))
        else:
            self._unopened = [
                entry for entry in self._unopened if (entry[0], entry[1].pass_id) != pass_id
            ]

    # From preprocessors

    def _from_preprocessor(self, message: object, fd: int | None) -> None:
        match message:
            case SampleMeasured():
                self._measured(message.name, message.sample_bytes)
            case ChunkProduced():
                assert fd is not None
                self._counts.preprocessed += message.num_samples
                self._counts.busy_s += message.busy_s
                self._files[message.key] = fd
                self._carry_out(self._store.produced(message.key, os.fstat(fd).st_size))
            case ChunkNotProduced():
                self._carry_out(self._store.failed(message.key, message.error))
            case _:
                raise ProtocolError(f"A preprocessor sent an unexpected {message!r}.")
        self._assign()

    def _measured(self, name: str, sample_bytes: int) -> None:
        num_samples = self._spec.dataset(name).num_samples
        size = choose_chunk_size(
            num_samples=num_samples, sample_bytes=sample_bytes, chunk_bytes=self._chunk_bytes
        )
        self._measuring.discard(name)
        self._chunk_sizes[name] = size
        num_chunks = count_chunks(num_samples, size)
        self._store.set_size(name, num_chunks=num_chunks, chunk_bytes=size * sample_bytes)
        waiting, self._unopened = self._unopened, []
        for reader_id, message in waiting:
            self._open(reader_id, message)  # those of other data sets wait on

    def _preprocessor_lost(self, key: ChunkKey | None) -> None:
        if key is not None:
            error = ChunkError(
                summary=f"Preprocessors died over a chunk of data set {key.name!r}: "
                "killed, out of memory, or a crash in native code."
            )
            self._carry_out(self._store.lost(key, error))
            if key.name in self._measuring and self._store.has_failed(key):
                # Nobody will tell the size now. Guess, so that readers get to hear of the failure.
                self._measured(key.name, limits.guess_sample_bytes(self._chunk_bytes))
        self._assign()

    # Instructions

    def _assign(self) -> None:
        """Gives preprocessors work while there is any that fits."""
        while self._pool.has_room():
            instructions = self._store.assign()
            self._carry_out(instructions)
            if not any(isinstance(instruction, Produce) for instruction in instructions):
                return

    def _carry_out(self, instructions: Iterable[Instruction]) -> None:
        # The peak is before the drops that bring it back into the budget.
        self._counts.peak_bytes = max(self._counts.peak_bytes, self._store.resident_bytes)
        for instruction in instructions:
            match instruction:
                case Grant():
                    reader_id, number = _split(instruction.pass_id)
                    ready = ChunkReady(pass_id=number, chunk=instruction.key.chunk)
                    self._readers[reader_id].channel.send(ready, self._files[instruction.key])
                case Refuse():
                    self._refuse(instruction)
                case Drop(key=key):
                    os.close(self._files.pop(key))
                    self._counts.num_dropped += 1
                case Produce(key=key):
                    size = self._chunk_sizes.get(key.name)
                    self._pool.give(ProduceChunk(key=key, chunk_size=size))

    def _refuse(self, refusal: Refuse) -> None:
        reader_id, number = _split(refusal.pass_id)
        failed = ChunkFailed(pass_id=number, chunk=refusal.key.chunk, error=refusal.error)
        self._readers[reader_id].channel.send(failed)


def _split(pass_id: Hashable) -> PassId:
    assert isinstance(pass_id, tuple)
    reader_id, number = pass_id
    return reader_id, number
