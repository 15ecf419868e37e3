"""The preprocessors as the agent sees them: started when there is work, replaced when they die."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from optuna_fleet.pipeline.messages import MeasureSample, ProduceChunk
from optuna_fleet.pipeline.spec import ChunkKey
from optuna_fleet.pipeline.wire import Port

Spawn = Callable[[Callable[[socket.socket], None]], tuple[int, socket.socket]]
"""Forks a child that runs the given main on its end of a ``wire.socket_pair()``, then exits.
Returns the child's pid and our end. The child has closed its copy of our end, and we ours of its
end: either side learns of the other's death by the end of the stream."""


_PAUSE_S = 5.0
"""How long after one could not be started the next is tried."""


@dataclass(slots=True, eq=False)
class _Worker:
    pid: int
    channel: Port
    key: ChunkKey | None = None
    began: float = 0.0
    is_fresh: bool = True


class PreprocessorPool:
    """Keeps at most ``limit`` preprocessors, each with at most one chunk to work on.

    Args:
        limit: Most processes at a time.
        spawn: Starts one.
        main: What it runs.
        selector: The agent's selector.
        on_message: Called with what a preprocessor sent; owns the descriptor.
        on_lost: Called with the chunk that a dead preprocessor worked on, or None.
        clock: Seconds since any time.

    Attributes:
        target: How many are wanted now, at most ``limit``. There is one in any case while there
            is work.
        num_lost: How many died.
        problem: Why one could not be started, or "".
    """

    def __init__(
        self,
        *,
        limit: int,
        spawn: Spawn,
        main: Callable[[socket.socket], None],
        selector: selectors.BaseSelector,
        on_message: Callable[[object, int | None], None],
        on_lost: Callable[[ChunkKey | None], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = limit
        self.target = limit
        self._spawn = spawn
        self._main = main
        self._selector = selector
        self._on_message = on_message
        self._on_lost = on_lost
        self._clock = clock
        self._workers: list[_Worker] = []
        self._unreaped: set[int] = set()
        self._paused_until = 0.0
        self.problem = ""
        self.num_lost = 0

    @property
    def pids(self) -> tuple[int, ...]:
        """Pids of the preprocessors that run."""
        return tuple(worker.pid for worker in self._workers)

    @property
    def channels(self) -> tuple[Port, ...]:
        """Their channels."""
        return tuple(worker.channel for worker in self._workers)

    @property
    def num_busy(self) -> int:
        """Number of preprocessors that work on a chunk."""
        return sum(worker.key is not None for worker in self._workers)

    @property
    def has_fresh(self) -> bool:
        """Whether some have yet to finish their first chunk: they still load the data sets."""
        return any(worker.is_fresh for worker in self._workers)

    def has_room(self) -> bool:
        """Returns whether one more chunk could be worked on."""
        if self.num_busy >= max(1, min(self.target, self._limit)):
            return False
        is_paused = self._clock() < self._paused_until
        return not is_paused or self.num_busy < len(self._workers)

    def end_surplus(self) -> None:
        """Ends idle preprocessors beyond the target, the latest first."""
        for worker in reversed(self._workers[:]):
            if len(self._workers) > self.target and worker.key is None:
                self._workers.remove(worker)
                worker.channel.close()  # it exits when it notices

    def give(self, work: MeasureSample | ProduceChunk) -> bool:
        """Hands work to an idle preprocessor, or to a new one; call only if there is room.

        Returns:
            Whether there was one; if none can be started, there is no room for a while.
        """
        worker = next((w for w in self._workers if w.key is None), None)
        try:
            worker = worker or self._start()
        except OSError as error:  # too many processes, or open files
            self._paused_until = self._clock() + _PAUSE_S
            self.problem = str(error)
            return False
        self.problem = ""
        worker.key, worker.began = work.key, self._clock()
        worker.channel.send(work)
        return True

    def kill_stuck(self, limit_s: float) -> None:
        """Kills those who have worked on one chunk for so long; others try it again."""
        for worker in self._workers:
            if worker.key is not None and self._clock() - worker.began >= limit_s:
                os.kill(worker.pid, signal.SIGKILL)
                worker.began = self._clock()  # once is enough

    def child_died(self, pid: int) -> bool:
        """Tells that a child was reaped; returns whether it was a preprocessor of this pool."""
        for worker in self._workers:
            if worker.pid == pid:
                worker.channel.drain()  # perhaps it finished a chunk before it died
                self._lose(worker)
                break
        known = pid in self._unreaped
        self._unreaped.discard(pid)
        return known

    def close(self) -> None:
        """Closes the sockets; preprocessors exit when they notice."""
        for worker in self._workers:
            worker.channel.close()
        self._workers.clear()

    def _start(self) -> _Worker:
        pid, sock = self._spawn(self._main)
        channel = Port(
            sock,
            self._selector,
            on_message=lambda message, fd: self._received(worker, message, fd),
            on_close=lambda: self._lose(worker),
        )
        worker = _Worker(pid, channel)
        self._workers.append(worker)
        self._unreaped.add(pid)
        return worker

    def _received(self, worker: _Worker, message: object, fd: int | None) -> None:
        if getattr(message, "key", None) is not None:
            worker.key = None  # the chunk is done, one way or the other
        self._on_message(message, fd)
        worker.is_fresh = False

    def _lose(self, worker: _Worker) -> None:
        # Its end of stream and its exit status both tell of one death.
        if worker in self._workers:
            self._workers.remove(worker)
            worker.channel.close()
            self.num_lost += 1
            self._on_lost(worker.key)
