"""The process that reads, decodes and augments: it turns orders for chunks into memory files."""

from __future__ import annotations

import ctypes
import os
import socket
import time

import torch

from optuna_fleet.pipeline import wire
from optuna_fleet.pipeline.chunks.layout import sample_bytes, write_chunk
from optuna_fleet.pipeline.chunks.spill import to_disk
from optuna_fleet.pipeline.limits import Budgets, guess_sample_bytes
from optuna_fleet.pipeline.messages import (
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
    decoded: DecodedSamples,
) -> None:
    """Serves the agent until it closes the socket.

    Args:
        sock: This process' end of the socket pair; blocking.
        payload: What unpickles to the data sets (``PayloadFile.reference()``).
        spec: Their description.
        settings: What the script's process is set to.
        budgets: What the pipeline may take.
        decoded: The decoded store.
    """
    Adoption(has_gpu=False).adopt(settings)
    # One core each: there is one preprocessor per core it may use.
    torch.set_num_threads(1)
    _keep_freed_memory(4 * budgets.chunk_bytes)
    sock.setblocking(True)
    samples = Samples(lambda: unpack(payload), spec, decoded, force_decoded=budgets.force_decoded)
    producer = _Producer(sock, spec, budgets, decoded, samples)
    try:
        while True:
            order, _ = wire.receive(sock)
            match order:
                case MeasureSample():
                    producer.measure(order.key)
                case ProduceChunk():
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


class _Producer:
    def __init__(
        self,
        sock: socket.socket,
        spec: PipelineSpec,
        budgets: Budgets,
        decoded: DecodedSamples,
        samples: Samples,
    ) -> None:
        self._sock = sock
        self._spec = spec
        self._budgets = budgets
        self._decoded = decoded
        self._samples = samples
        # Samples of the last order that are wanted again by the next one.
        self._kept: tuple[ChunkKey, list[Sample]] | None = None

    def measure(self, key: ChunkKey) -> None:
        """Answers how large a preprocessed sample of the data set is."""
        by_user = self._spec.dataset(key.name).collate is not None
        nbytes = guess_sample_bytes(self._budgets.chunk_bytes)
        header_bytes, prepared_bytes, sample_s = 0, None, 0.0
        try:
            sample = self._samples.sample(key, 0)
            sample_s = self._second_sample(key, sample)
            prepared_bytes = self._samples.prepared_bytes(key)
            nbytes = sample_bytes(sample.data, collated_by_user=by_user)
            fd = write_chunk([sample.data], collated_by_user=by_user)
            header_bytes = max(0, os.fstat(fd).st_size - nbytes)
            os.close(fd)
            nbytes = max(nbytes, self._largest(key, sample_s))
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
            ),
        )

    def _largest(self, key: ChunkKey, sample_s: float) -> int:
        """Returns the size of the largest of a few samples; of two if these are alike."""
        assert self._kept is not None
        by_user = self._spec.dataset(key.name).collate is not None
        samples = self._kept[1]
        sizes = [sample_bytes(sample.data, collated_by_user=by_user) for sample in samples]
        most = min(MIN_CHUNK_SAMPLES, self._spec.dataset(key.name).num_samples)
        while len(set(sizes)) > 1 and len(sizes) < most and len(sizes) * sample_s < CHUNK_S:
            samples.append(self._samples.sample(key, len(sizes)))  # the first chunk will have it
            sizes.append(sample_bytes(samples[-1].data, collated_by_user=by_user))
        return max(sizes)

    def _second_sample(self, key: ChunkKey, first: Sample) -> float:
        """Makes one more sample, as the first had much to load, and returns the seconds."""
        self._kept = (key, [first])
        if self._spec.dataset(key.name).num_samples == 1:
            return 0.0
        began = time.perf_counter()
        try:
            second = self._samples.sample(key, 1)
        except SampleError:
            return 0.0  # the order for its chunk will tell
        self._kept = (key, [first, second])
        return time.perf_counter() - began

    def produce(self, order: ProduceChunk) -> None:
        """Makes a chunk and sends it."""
        began = time.perf_counter()
        try:
            samples = self._make(order)
            dataset = self._spec.dataset(order.key.name)
            by_user = dataset.collate is not None
            with reported(f"A chunk of data set {order.key.name!r} could not be stored: it"):
                data, is_finished = self._samples.alike(order.key.name, samples)
                fd = write_chunk(
                    data,
                    collated_by_user=by_user,
                    is_finished=is_finished,
                    read_often=not dataset.shuffled,
                )
        except SampleError as failure:
            wire.send(self._sock, ChunkNotProduced(key=order.key, error=failure.error))
            return
        nbytes = os.fstat(fd).st_size
        if nbytes > order.max_bytes:
            os.close(fd)
            self._kept = (order.key, samples)
            wire.send(self._sock, ChunkOutgrew(key=order.key, nbytes=nbytes))
            return
        self._send(order, fd, len(samples), began)

    def _make(self, order: ProduceChunk) -> list[Sample]:
        key, size = order.key, order.chunk_size
        samples: list[Sample] = []
        if self._kept is not None and self._kept[0] == key:
            samples = self._kept[1][:size]
        else:
            self._samples.begin()
        self._kept = None
        self._decoded.begin(order.extents)
        start = key.chunk * size
        stop = min(start + size, self._spec.dataset(key.name).num_samples)
        for position in range(start + len(samples), stop):
            samples.append(self._samples.sample(key, position, use_store=order.split))
        if self._samples.num_loaded and key.name in self._samples.audit.mismatches:
            self._samples.begin()  # found just now: those before it can't be trusted either
            return [self._samples.sample(key, position) for position in range(start, stop)]
        return samples

    def _send(self, order: ProduceChunk, fd: int, num_samples: int, began: float) -> None:
        if order.place == "disk":
            assert self._budgets.spill_dir is not None
            try:
                fd = to_disk(fd, self._budgets.spill_dir)
            except OSError as error:
                wire.send(self._sock, DiskFailed(key=order.key, reason=str(error)))
                return
        try:
            done = ChunkProduced(
                key=order.key,
                num_samples=num_samples,
                busy_s=time.perf_counter() - began,
                stored=self._decoded.stored(),
                num_loaded=self._samples.num_loaded,
                skipped=tuple(self._samples.skipped),
                complaint=self._samples.complaint,
                mismatch=self._samples.audit.mismatches.get(order.key.name),
            )
            wire.send(self._sock, done, fd)
        finally:
            os.close(fd)
