"""Reads chunks from this node's own agent, on behalf of other nodes."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from functools import partial
from itertools import count
from mmap import MAP_PRIVATE, mmap
from queue import SimpleQueue

from optuna_fleet.pipeline import wire
from optuna_fleet.pipeline.messages import (
    Advance,
    ChunkFailed,
    ChunkReady,
    ClosePass,
    OpenPass,
    PassOpened,
    ReleaseChunks,
)
from optuna_fleet.pipeline.spec import ChunkKey, PipelineSpec

_Reply = tuple[PassOpened | ChunkReady | ChunkFailed, int | None]


class LocalReader:
    """Speaks a trainer's side of the pipeline, one short pass per chunk; for many threads.

    A pass stands behind the last chunk, so the agent looks ahead for none of them.

    Args:
        sock: The other end is the agent's.
        spec: The data sets.
    """

    def __init__(self, sock: socket.socket, spec: PipelineSpec) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._spec = spec
        self._lock = threading.Lock()
        self._numbers = count()
        self._passes: dict[int, SimpleQueue[_Reply]] = {}

    def run(self) -> None:
        """Hands on what the agent says, until it is gone."""
        while True:
            try:
                message, fd = wire.receive(self._sock)
            except EOFError:
                return
            if isinstance(message, ReleaseChunks):
                self._close(message.pass_id)
                continue
            assert isinstance(message, PassOpened | ChunkReady | ChunkFailed)
            self._passes[message.pass_id].put((message, fd))

    def chunk_size(self, name: str) -> int:
        """Waits until the chunk size of a data set is known."""
        number, _, size = self._open(name, 0)
        self._close(number)
        return size

    def borrow(self, key: ChunkKey, chunk_size: int) -> tuple[mmap | None, Callable[[], None]]:
        """Waits for a chunk and returns its memory, and what gives it back.

        There is no memory if chunks have another size here, or this one could not be made.
        """
        number, replies, size = self._open(key.name, key.epoch)
        release = partial(self._close, number)
        if size != chunk_size:
            return None, release
        end = 2 * self._spec.dataset(key.name).num_samples
        self._send(Advance(pass_id=number, cursor=end, needed=(key.chunk,)))
        message, fd = replies.get()
        if fd is None:
            return None, release
        try:
            # Private, hence writable: torch warns of memory that is read-only.
            memory = mmap(fd, 0, flags=MAP_PRIVATE)
        finally:
            os.close(fd)
        if isinstance(message, ChunkReady) and message.brief:
            release()  # the bytes on their way are as good as a copy
        return memory, release

    def _open(self, name: str, epoch: int) -> tuple[int, SimpleQueue[_Reply], int]:
        number = next(self._numbers)
        replies = self._passes[number] = SimpleQueue()
        beyond = 2 * self._spec.dataset(name).num_samples
        self._send(OpenPass(pass_id=number, name=name, epoch=epoch, start=beyond, continues=False))
        opened, _ = replies.get()
        assert isinstance(opened, PassOpened)
        return number, replies, opened.chunk_size

    def _close(self, number: int) -> None:
        if self._passes.pop(number, None) is not None:
            self._send(ClosePass(pass_id=number, num_consumed=0, waited_s=0.0))

    def _send(self, message: object) -> None:
        with self._lock:
            wire.send(self._sock, message)
