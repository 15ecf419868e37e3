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
from optuna_fleet.pipeline.chunks.layout import Chunk
from optuna_fleet.pipeline.exchange import AskForChunk, Asking
from optuna_fleet.pipeline.limits import guess_sample_bytes
from optuna_fleet.pipeline.pipeline_messages import (
    AtWork,
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
from optuna_fleet.pipeline.spec import MIN_CHUNK_SAMPLES, ChunkKey, PipelineSpec, Source
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
        """Answers how large the largest of the first samples of the data set is.

        These are so many that some differ, if any do; the first chunk will have them.
        """
        self.told_s = time.monotonic()
        key, samples = ChunkKey(order.name, 0, 0), list[Any]()
        most = min(MIN_CHUNK_SAMPLES, self.spec.dataset(order.name).num_samples)
        sizes: set[int] = set()
        header_bytes, is_repeatable, are_rows = 0, True, False
        self.samples.begin()
        try:
            while len(samples) < most and (len(samples) < 3 or len(sizes) > 1):
                samples.append(self.samples.sample(key, len(samples)))
                chunk = self._put_together(key, samples[-1:])
                sizes.add(chunk.sample_bytes)
                header_bytes = max(header_bytes, chunk.nbytes - chunk.sample_bytes)
                self.tell()
            is_repeatable = self.samples.is_repeatable(key, samples[0])
            are_rows = self.samples.rows(key, range(1)) is not None
            self.kept = _Kept(key, samples)
        except Exception:
            self.kept = None  # if need be, the order for the chunk tells the error
        wire.send(
            self.sock,
            SampleMeasured(
                name=order.name,
                sample_bytes=max(sizes, default=guess_sample_bytes(self.chunk_bytes)),
                header_bytes=header_bytes,
                is_repeatable=is_repeatable,
                are_rows=are_rows,
                has_failed=self.kept is None,
            ),
        )

    def _put_together(self, key: ChunkKey, samples: list[Any]) -> Chunk:
        by_user = self.spec.dataset(key.name).collate is not None
        return Chunk.of(samples, collated_by_user=by_user)

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
            done = ChunkProduced(
                key=order.key, nbytes=data.nbytes, num_samples=len(self._positions(order))
            )
            wire.send(self.sock, done)

    def produce(self, order: ProduceChunk) -> None:
        """Makes a chunk where it was ordered, and says so."""
        self.told_s = time.monotonic()
        key = order.key
        positions = self._positions(order)
        try:
            with reported(f"A chunk of data set {key.name!r} could not be stored: it"):
                chunk = self._made(key, positions)
                if chunk.nbytes <= order.max_bytes:
                    chunk.write(self.arena.writable(order.address, chunk.nbytes))
        except SampleError as failure:
            wire.send(self.sock, ChunkNotProduced(key=key, error=failure.error))
            return
        if chunk.nbytes > order.max_bytes:
            wire.send(self.sock, ChunkOutgrew(key=key, nbytes=chunk.nbytes))
            return
        self.kept = None
        done = ChunkProduced(
            key=key,
            nbytes=chunk.nbytes,
            num_samples=len(positions),
            num_loaded=self.samples.num_loaded,
            skipped=tuple(self.samples.skipped),
            complaint=self.samples.complaint,
        )
        wire.send(self.sock, done)

    def _positions(self, order: ProduceChunk) -> range:
        start = order.key.chunk * order.chunk_size
        num_samples = self.spec.dataset(order.key.name).num_samples
        return range(start, min(start + order.chunk_size, num_samples))

    def _made(self, key: ChunkKey, positions: range) -> Chunk:
        """Returns a chunk, of which the first samples may be there already."""
        kept, self.kept = self.kept, None
        if kept is None or kept.key != key:
            kept = _Kept(key, [])
            self.samples.begin()
        rows = self.samples.rows(key, positions)
        if rows is not None and (chunk := Chunk.of_rows(rows)) is not None:
            return chunk
        del kept.samples[len(positions) :]
        kept.samples.extend(self.samples.several(key, positions[len(kept.samples) :]))
        self.kept = kept  # it may be too large for its place
        return self._put_together(key, kept.samples)
