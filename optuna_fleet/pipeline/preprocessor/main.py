"""The process that reads, decodes and augments: it fills places in the arena as ordered."""

from __future__ import annotations

import ctypes
import socket
import time
from functools import partial
from typing import NamedTuple

import torch

from optuna_fleet.pipeline import wire
from optuna_fleet.pipeline.chunks.arena import Arena
from optuna_fleet.pipeline.chunks.layout import (
    ChunkWriter,
    OutgrownError,
    sample_bytes,
    write_chunk,
)
from optuna_fleet.pipeline.exchange.peers import Peers
from optuna_fleet.pipeline.limits import Budgets, guess_sample_bytes
from optuna_fleet.pipeline.messages import (
    ChunkFetched,
    ChunkNotFetched,
    ChunkNotProduced,
    ChunkOutgrew,
    ChunkProduced,
    DiskFailed,
    MeasureSample,
    ProduceChunk,
    SampleMeasured,
)
from optuna_fleet.pipeline.preprocessor.decoded_samples import DecodedSamples
from optuna_fleet.pipeline.preprocessor.sampling import (
    Sample,
    SampleError,
    Samples,
    reported,
)
from optuna_fleet.pipeline.spec import CHUNK_S, MIN_CHUNK_SAMPLES, ChunkKey, PipelineSpec
from optuna_fleet.settings import Adoption, Settings
from optuna_fleet.wire.packing import unpack

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20  # bytes; glibc takes no more


def preprocessor_main(
    sock: socket.socket,
    *,
    payload: bytes,
    spec: PipelineSpec,
    settings: Settings,
    budgets: Budgets,
    arena: Arena,
    decoded: DecodedSamples,
    peers: Peers | None = None,
) -> None:
    """Serves the agent until it closes the socket.

    Args:
        sock: This process' end of the socket pair; blocking.
        payload: What unpickles to the data sets (``PayloadFile.reference()``).
        spec: Their description.
        settings: What the script's process is set to.
        budgets: What the pipeline may take.
        arena: Where chunks are written.
        decoded: The decoded store.
        peers: The nodes that share chunks with this one.
    """
    Adoption(has_gpu=False).adopt(settings)
    # One core each: there is one preprocessor per core it may use.
    torch.set_num_threads(1)
    _keep_freed_memory(budgets.chunk_bytes)
    sock.setblocking(True)
    samples = Samples(lambda: unpack(payload), spec, decoded, force_decoded=budgets.force_decoded)
    producer = _Producer(sock, spec, budgets, arena, decoded, samples, peers)
    try:
        while True:
            match wire.receive(sock):
                case MeasureSample(key=key):
                    producer.measure(key)
                case ProduceChunk(fetch=True) as order:
                    producer.fetch(order)
                case ProduceChunk() as order:
                    producer.produce(order)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the agent is gone, or has no more use for this process


def _keep_freed_memory(nbytes: int) -> None:
    """Has the C library reuse what is freed instead of returning it to the kernel.

    Page faults would otherwise cost a float32 image as much as its augmentation.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, nbytes)


class _Kept(NamedTuple):
    """Samples of a chunk that is wanted again by the next order, and whether all are finished."""

    key: ChunkKey
    samples: list[Sample]


class _Producer:
    def __init__(
        self,
        sock: socket.socket,
        spec: PipelineSpec,
        budgets: Budgets,
        arena: Arena,
        decoded: DecodedSamples,
        samples: Samples,
        peers: Peers | None,
    ) -> None:
        self._sock = sock
        self._spec = spec
        self._budgets = budgets
        self._arena = arena
        self._decoded = decoded
        self._samples = samples
        self._peers = peers
        self._kept: _Kept | None = None

    def measure(self, key: ChunkKey) -> None:
        """Answers how large a preprocessed sample of the data set is, and how long it takes."""
        by_user = self._spec.dataset(key.name).collate is not None
        nbytes = guess_sample_bytes(self._budgets.chunk_bytes)
        header_bytes, prepared_bytes, sample_s = 0, None, 0.0
        try:
            first = self._samples.sample(key, 0)
            self._kept = _Kept(key, [first])
            prepared_bytes = self._samples.prepared_bytes(key)
            nbytes, sample_s = self._further(self._kept, by_user)
            chunk = write_chunk([first.data], collated_by_user=by_user)
            first_bytes = sample_bytes(first.data, collated_by_user=by_user)
            header_bytes = max(0, chunk.nbytes - first_bytes)
        except Exception:
            pass  # The size is a guess then; the order for the chunk will tell the error.
        wire.send(
            self._sock,
            SampleMeasured(
                key=key,
                sample_bytes=nbytes,
                header_bytes=header_bytes,
                sample_s=sample_s,
                prepared_bytes=prepared_bytes,
                chunk_size=self._peers.chunk_size(key.name) if self._peers else None,
            ),
        )

    def _further(self, kept: _Kept, by_user: bool) -> tuple[int, float]:
        """Makes a few more samples, which the first chunk will have: some are slow, or large.

        Returns:
            Bytes of the largest, and the seconds that the fastest took.
        """
        most = min(MIN_CHUNK_SAMPLES, self._spec.dataset(kept.key.name).num_samples)
        sizes = [sample_bytes(kept.samples[0].data, collated_by_user=by_user)]
        times: list[float] = []
        while (
            len(sizes) < most and (len(sizes) < 3 or len(set(sizes)) > 1) and sum(times) < CHUNK_S
        ):
            started = time.perf_counter()
            try:
                sample = self._samples.sample(kept.key, len(kept.samples))
            except SampleError:
                break  # the order for its chunk will tell
            times.append(time.perf_counter() - started)
            sizes.append(sample_bytes(sample.data, collated_by_user=by_user))
            kept.samples.append(sample)
        return max(sizes), min(times, default=0.0)

    def fetch(self, order: ProduceChunk) -> None:
        """Gets a chunk from the node that owns it, and says so."""
        assert self._peers is not None
        began = time.perf_counter()
        data = self._peers.fetch(order.key, order.chunk_size)
        if data is None:
            wire.send(self._sock, ChunkNotFetched(key=order.key))
        elif data.nbytes > order.max_bytes:
            wire.send(self._sock, ChunkOutgrew(key=order.key, nbytes=data.nbytes))
        else:
            room = self._arena.writable(order.address, order.max_bytes)
            room[: data.nbytes] = data
            if self._commit(order, room[: data.nbytes]):
                seconds = time.perf_counter() - began
                done = ChunkFetched(key=order.key, nbytes=data.nbytes, seconds=seconds)
                wire.send(self._sock, done)

    def produce(self, order: ProduceChunk) -> None:
        """Makes a chunk where it was ordered, and says so."""
        began = time.perf_counter()
        key = order.key
        try:
            room = self._arena.writable(order.address, order.max_bytes)
            nbytes, num_samples, num_made = self._written(order, room)
        except SampleError as failure:
            wire.send(self._sock, ChunkNotProduced(key=key, error=failure.error))
            return
        except OutgrownError as failure:
            wire.send(self._sock, ChunkOutgrew(key=key, nbytes=failure.nbytes))
            return
        if not self._commit(order, room[:nbytes]):
            return
        done = ChunkProduced(
            key=key,
            nbytes=nbytes,
            num_samples=num_samples,
            num_made=num_made,
            busy_s=time.perf_counter() - began,
            stored=self._decoded.stored(),
            num_loaded=self._samples.num_loaded,
            skipped=tuple(self._samples.skipped),
            complaint=self._samples.complaint,
            mismatch=self._samples.audit.mismatches.get(key.name),
        )
        wire.send(self._sock, done)

    def _commit(self, order: ProduceChunk, written: memoryview) -> bool:
        """Returns whether a chunk is where it was ordered to."""
        try:
            self._arena.commit(order.address, written)
        except OSError as error:
            wire.send(self._sock, DiskFailed(key=order.key, reason=str(error)))
            return False
        return True

    def _written(self, order: ProduceChunk, room: memoryview) -> tuple[int, int, int]:
        try:
            return self._write(order, room)
        except (SampleError, OutgrownError):
            raise
        except Exception:
            with reported(f"A chunk of data set {order.key.name!r} could not be stored: it"):
                raise

    def _write(self, order: ProduceChunk, room: memoryview) -> tuple[int, int, int]:
        """Returns the chunk's bytes, its samples, and how many of them were made just now."""
        key, size = order.key, order.chunk_size
        made: list[Sample] = []
        if self._kept is not None and self._kept.key == key:
            made = self._kept.samples[:size]
        else:
            self._samples.begin()
        self._kept = None
        self._decoded.begin(order.extents)
        start = key.chunk * size
        stop = min(start + size, self._spec.dataset(key.name).num_samples)
        chunk = _Chunk(self._samples, key, room, stop - start, self._by_user(key))
        self._samples.expect(key, start + len(made), stop)
        try:
            for sample in made:
                chunk.add(sample)
            for position in range(start + len(made), stop):
                chunk.add(self._samples.sample(key, position, use_store=order.split))
            if self._samples.num_loaded and key.name in self._samples.audit.mismatches:
                self._samples.begin()  # found just now: those before it can't be trusted either
                chunk = _Chunk(self._samples, key, room, stop - start, self._by_user(key))
                for position in range(start, stop):
                    chunk.add(self._samples.sample(key, position))
            return chunk.finish(), stop - start, stop - start - len(made)
        except OutgrownError:
            self._kept = _Kept(key, chunk.samples())
            raise

    def _by_user(self, key: ChunkKey) -> bool:
        return self._spec.dataset(key.name).collate is not None


class _Chunk:
    """A chunk while it is being written: its samples are all finished, or none of them is."""

    def __init__(
        self, samples: Samples, key: ChunkKey, room: memoryview, num_samples: int, by_user: bool
    ) -> None:
        self._samples = samples
        self._key = key
        self._new = partial(ChunkWriter, room, num_samples, collated_by_user=by_user)
        self._writer = self._new()
        self._is_finished: bool | None = None
        self._unwritten: list[Sample] = []

    def add(self, sample: Sample) -> None:
        """Adds a sample."""
        if self._is_finished is None:
            self._is_finished = sample.is_finished
        added = [sample]
        if self._is_finished != sample.is_finished:
            data, _ = self._samples.alike(self._key.name, [*self.samples(), sample])
            added = [Sample(each, True) for each in data]
            self._writer, self._is_finished = self._new(), True
        self._unwritten = added
        for each in added:
            self._writer.add(each.data)
        self._unwritten = []

    def samples(self) -> list[Sample]:
        """Returns all that was added, also what did not fit."""
        if len(self._unwritten) > 1:
            return self._unwritten
        written = [Sample(data, bool(self._is_finished)) for data in self._writer.samples()]
        return [*written, *self._unwritten]

    def finish(self) -> int:
        """Returns the bytes of the chunk."""
        return self._writer.finish(is_finished=self._is_finished is not False)
