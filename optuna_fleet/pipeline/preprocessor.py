"""The preprocessor process: turns ranges of the canonical order into chunks."""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import cloudpickle
import torch

from optuna_fleet.pipeline import wire
from optuna_fleet.pipeline.columns import without_images
from optuna_fleet.pipeline.layout import sample_bytes, write_chunk
from optuna_fleet.pipeline.limits import guess_sample_bytes
from optuna_fleet.pipeline.messages import (
    MAX_TEXT,
    ChunkError,
    ChunkNotProduced,
    ChunkProduced,
    ProduceChunk,
    SampleMeasured,
)
from optuna_fleet.pipeline.order import permutation, seed_sample
from optuna_fleet.pipeline.spec import ChunkKey, DatasetSpec, PipelineSpec, choose_chunk_size
from optuna_fleet.pipeline.structure import map_leaves


def preprocessor_main(
    sock: socket.socket, *, payload: bytes, spec: PipelineSpec, chunk_bytes: int
) -> None:
    """Serves the agent until it closes the socket.

    Args:
        sock: This process' end of the socket pair; blocking.
        payload: The data sets by name, as cloudpickle bytes.
        spec: The description of the same data sets.
        chunk_bytes: Size of a chunk to aim at.
    """
    # One core each: there is one preprocessor per core it may use.
    torch.set_num_threads(1)
    sock.setblocking(True)
    producer = _Producer(sock, payload=payload, spec=spec, chunk_bytes=chunk_bytes)
    try:
        while True:
            work, _ = wire.receive(sock)
            assert isinstance(work, ProduceChunk)
            producer.serve(work)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the agent is gone, or has no more use for this process


class _SampleError(Exception):
    def __init__(self, error: ChunkError) -> None:
        self.error = error


class _Producer:
    def __init__(
        self, sock: socket.socket, *, payload: bytes, spec: PipelineSpec, chunk_bytes: int
    ) -> None:
        self._sock = sock
        self._payload = payload
        self._spec = spec
        self._chunk_bytes = chunk_bytes
        self._datasets: Mapping[str, Sequence[Any]] | None = None
        self._order = lru_cache(maxsize=4)(permutation)

    def serve(self, work: ProduceChunk) -> None:
        begin = time.perf_counter()
        try:
            num_samples, fd = self._produce(work)
        except _SampleError as failure:
            wire.send(self._sock, ChunkNotProduced(key=work.key, error=failure.error))
            return
        try:
            busy_s = time.perf_counter() - begin
            done = ChunkProduced(key=work.key, num_samples=num_samples, busy_s=busy_s)
            wire.send(self._sock, done, fd)
        finally:
            os.close(fd)

    def _produce(self, work: ProduceChunk) -> tuple[int, int]:
        spec = self._spec.dataset(work.key.name)
        samples: list[Any] = []
        size = work.chunk_size
        if size is None:
            size = self._measure(work.key, spec, samples)
        start = work.key.chunk * size
        stop = min(start + size, spec.num_samples)
        for position in range(start + len(samples), stop):
            samples.append(self._sample(work.key, spec, position))
        what = f"A chunk of data set {spec.name!r} could not be stored"
        by_user = spec.collate is not None
        return len(samples), _reported(
            what, lambda: write_chunk(samples, collated_by_user=by_user)
        )

    def _measure(self, key: ChunkKey, spec: DatasetSpec, samples: list[Any]) -> int:
        """Prepares the first sample, reports its size, and returns how many make a chunk."""
        nbytes = guess_sample_bytes(self._chunk_bytes)
        try:
            samples.append(self._sample(key, spec, 0))
            nbytes = sample_bytes(samples[0], collated_by_user=spec.collate is not None)
        finally:
            # Also after a failure: the size is then a guess, and the agent can go on.
            wire.send(self._sock, SampleMeasured(name=spec.name, sample_bytes=nbytes))
        return choose_chunk_size(
            num_samples=spec.num_samples, sample_bytes=nbytes, chunk_bytes=self._chunk_bytes
        )

    def _sample(self, key: ChunkKey, spec: DatasetSpec, position: int) -> Any:
        seed, index = self._spec.seed, position
        if spec.shuffled:
            index = int(self._order(seed, key.name, key.epoch, spec.num_samples)[position])
        dataset = self._dataset(key.name)
        seed_sample(seed, key.name, key.epoch, index)
        what = f"Sample {index} of data set {key.name!r}"
        sample = _reported(what, lambda: dataset[index])
        return sample if spec.collate is not None else map_leaves(sample, without_images)

    def _dataset(self, name: str) -> Sequence[Any]:
        if self._datasets is None:
            what = "Unpickling the data sets in a preprocessor"
            datasets: Mapping[str, Sequence[Any]] = _reported(
                what, lambda: cloudpickle.loads(self._payload)
            )
            self._datasets = datasets
            self._payload = b""
        return self._datasets[name]


def _reported(what: str, action: Callable[[], Any]) -> Any:
    """Returns what ``action`` returns; an exception becomes one that can be sent."""
    try:
        return action()
    except Exception as error:
        summary = f"{what} raised {type(error).__name__}: {error}"
        # Without our own frames: the reader looks for the line in the data set.
        frames = error.__traceback__
        for _ in range(2):
            frames = frames.tb_next if frames is not None and frames.tb_next else frames
        lines = traceback.format_exception(type(error), error, frames)
        raise _SampleError(
            ChunkError(summary=summary[:MAX_TEXT], traceback="".join(lines)[-MAX_TEXT:])
        ) from None
