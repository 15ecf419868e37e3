"""The process that reads, decodes and augments: it fills places in the arena as ordered."""

from __future__ import annotations

import ctypes
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from optuna_fleet.pipeline import wire
from optuna_fleet.pipeline.chunks.arena import Arena
from optuna_fleet.pipeline.chunks.layout import (
    ChunkWriter,
    OutgrownError,
    sample_bytes,
    write_chunk,
    write_rows,
)
from optuna_fleet.pipeline.exchange import AskForChunk, Asking
from optuna_fleet.pipeline.limits import guess_sample_bytes
from optuna_fleet.pipeline.pipeline_messages import (
    AtWork,
    ChunkFetched,
    ChunkNotFetched,
    ChunkNotProduced,
    ChunkOutgrew,
    ChunkProduced,
    MeasureSample,
    ProduceChunk,
    SampleMeasured,
)
from optuna_fleet.pipeline.preprocessor.decoded import DecodedStore
from optuna_fleet.pipeline.preprocessor.sampling import SampleError, Samples, reported
from optuna_fleet.pipeline.preprocessor.source import Source
from optuna_fleet.pipeline.spec import MIN_CHUNK_SAMPLES, ChunkKey, PipelineSpec
from optuna_fleet.settings import Adoption, Settings

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20  # bytes; glibc takes no more

_TELL_S = 1.0
"""Who is at a chunk for longer says so after a sample, at most that often."""


def preprocessor_main(
    sock: socket.socket,
    *,
    load: Callable[[], Source],
    spec: PipelineSpec,
    settings: Settings,
    chunk_bytes: int,
    arena: Arena,
    decoded: DecodedStore,
    asking: Asking | None = None,
) -> None:
    """Serves the agent until it closes the socket.

    ``load`` returns the data sets, ``settings`` are those of the script, ``asking`` is the way to
    nodes that share chunks with this one.
    """
    adoption = Adoption(has_gpu=False)
    adoption.adopt(settings)
    adoption.adopt_torch(settings)
    # One core each: there is one preprocessor per core it may use.
    torch.set_num_threads(1)
    _keep_freed_memory(chunk_bytes)
    sock.setblocking(True)
    samples = Samples(load, spec, decoded)
    producer = _Producer(
        sock=sock,
        spec=spec,
        chunk_bytes=chunk_bytes,
        arena=arena,
        samples=samples,
        asking=asking,
    )
    samples.at_work = producer.tell
    try:
        while True:
            match wire.receive(sock):
                case MeasureSample() as order:
                    producer.measure(order)
                case ProduceChunk(source=None) as order:
                    producer.produce(order)
                case ProduceChunk() as order:
                    producer.fetch(order)
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
    """The first samples of a chunk that is wanted again by the next order."""

    key: ChunkKey
    samples: list[Any]


@dataclass(slots=True, kw_only=True)
class _Producer:
    sock: socket.socket
    spec: PipelineSpec
    chunk_bytes: int
    arena: Arena
    samples: Samples
    asking: Asking | None
    kept: _Kept | None = None
    told_s: float = 0.0  # when the agent last heard, or was heard of

    def measure(self, order: MeasureSample) -> None:
        """Answers how large a preprocessed sample of the data set is."""
        self.told_s = time.monotonic()
        key = ChunkKey(order.name, 0, 0)
        by_user = self.spec.dataset(key.name).collate is not None
        nbytes = guess_sample_bytes(self.chunk_bytes)
        header_bytes, is_repeatable, are_rows = 0, True, False
        self.samples.begin()
        try:
            first = self._sample(key, 0)
            self.kept = _Kept(key, [first])
            nbytes = self._largest(self.kept, by_user)
            is_repeatable = self.samples.is_repeatable(key, first)
            are_rows = self.samples.rows(key, range(1)) is not None
            chunk = write_chunk([first], collated_by_user=by_user)
            first_bytes = sample_bytes(first, collated_by_user=by_user)
            header_bytes = max(0, chunk.nbytes - first_bytes)
        except Exception:
            pass  # The size is a guess then; the order for the chunk will tell the error.
        wire.send(
            self.sock,
            SampleMeasured(
                name=order.name,
                sample_bytes=nbytes,
                header_bytes=header_bytes,
                is_repeatable=is_repeatable,
                are_rows=are_rows,
            ),
        )

    def _largest(self, kept: _Kept, by_user: bool) -> int:
        """Makes a few more samples, which the first chunk will have; the bytes of the largest."""
        most = min(MIN_CHUNK_SAMPLES, self.spec.dataset(kept.key.name).num_samples)
        sizes = [sample_bytes(kept.samples[0], collated_by_user=by_user)]
        while len(sizes) < most and (len(sizes) < 3 or len(set(sizes)) > 1):
            try:
                sample = self._sample(kept.key, len(kept.samples))
            except SampleError:
                break  # the order for its chunk will tell
            sizes.append(sample_bytes(sample, collated_by_user=by_user))
            kept.samples.append(sample)
        return max(sizes)

    def _sample(self, key: ChunkKey, position: int) -> Any:
        made = self.samples.sample(key, position)
        self.tell()
        return made

    def tell(self) -> None:
        """A sample was made."""
        if time.monotonic() - self.told_s > _TELL_S:
            wire.send(self.sock, AtWork())
            self.told_s = time.monotonic()

    def fetch(self, order: ProduceChunk) -> None:
        """Gets a chunk from the node that owns it, and says so."""
        assert self.asking is not None
        assert order.source is not None
        is_finished = self.spec.dataset(order.key.name).finish is None
        question = AskForChunk(order.key, order.chunk_size, is_finished)
        has_answered, data = self.asking.ask(order.source, question)
        if data is None:
            wire.send(self.sock, ChunkNotFetched(key=order.key, is_gone=not has_answered))
        elif data.nbytes > order.max_bytes:
            wire.send(self.sock, ChunkOutgrew(key=order.key, nbytes=data.nbytes))
        else:
            room = self.arena.writable(order.address, order.max_bytes)
            room[: data.nbytes] = data
            wire.send(self.sock, ChunkFetched(key=order.key, nbytes=data.nbytes))

    def produce(self, order: ProduceChunk) -> None:
        """Makes a chunk where it was ordered, and says so."""
        began, self.told_s = time.perf_counter(), time.monotonic()
        key = order.key
        try:
            room = self.arena.writable(order.address, order.max_bytes)
            with reported(f"A chunk of data set {key.name!r} could not be stored: it"):
                nbytes, num_samples = self._write(order, room)
        except SampleError as failure:
            wire.send(self.sock, ChunkNotProduced(key=key, error=failure.error))
            return
        except OutgrownError as failure:
            wire.send(self.sock, ChunkOutgrew(key=key, nbytes=failure.nbytes))
            return
        done = ChunkProduced(
            key=key,
            nbytes=nbytes,
            num_samples=num_samples,
            busy_s=time.perf_counter() - began,
            num_loaded=self.samples.num_loaded,
            skipped=tuple(self.samples.skipped),
            complaint=self.samples.complaint,
        )
        wire.send(self.sock, done)

    def _write(self, order: ProduceChunk, room: memoryview) -> tuple[int, int]:
        """Returns the chunk's bytes, and its samples."""
        key, start, samples = order.key, order.key.chunk * order.chunk_size, self.samples
        stop = min(start + order.chunk_size, self.spec.dataset(key.name).num_samples)
        kept, self.kept = self.kept, None
        made: list[Any] = []
        if kept is not None and kept.key == key:
            made = kept.samples[: order.chunk_size]
        else:
            samples.begin()
        nbytes = self._filled(order, room, made, range(start, stop))
        return nbytes, stop - start

    def _filled(
        self, order: ProduceChunk, room: memoryview, made: list[Any], positions: range
    ) -> int:
        """Returns the chunk's bytes, of which the first samples are there already."""
        rows = self.samples.rows(order.key, positions)
        if rows is not None and (nbytes := write_rows(room, rows)) is not None:
            return nbytes
        by_user = self.spec.dataset(order.key.name).collate is not None
        writer = ChunkWriter(room, len(positions), collated_by_user=by_user)
        try:
            for each in made:
                writer.add(each)
            for position in positions[len(made) :]:
                writer.add(self.samples.sample(order.key, position))
                self.tell()
            return writer.finish()
        except OutgrownError:
            self.kept = _Kept(order.key, writer.samples())
            raise
