"""The preprocessors as the agent sees them: started when there is work, replaced when they die."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from optuna_fleet.pipeline.messages import AtWork, MeasureSample, ProduceChunk
from optuna_fleet.pipeline.spec import ChunkKey
from optuna_fleet.pipeline.wire import Port

Spawn = Callable[[Callable[[socket.socket], None]], tuple[int, socket.socket]]
"""Forks a child that runs the given main on its end of a ``wire.socket_pair()``, then exits.
Returns the child's pid and our end. The child has closed its copy of our end, and we ours of its
end: either side learns of the other's death by the end of the stream."""

IDLE_S = 60.0
"""A preprocessor that was idle for so long is ended, where there are as many as are needed."""

_RETRY_AFTER_S = 1.0


@dataclass(slots=True, eq=False)
class _Worker:
    pid: int
    channel: Port
    key: ChunkKey | None = None
    since: float = 0.0  # when it got the key, was done with the last one, or said that it works
    is_fresh: bool = True
    is_cut_off: bool = False


class PreprocessorPool:
    """Keeps at most ``limit`` preprocessors, each with at most one chunk to work on.

    ``on_lost`` is called with the chunk that a dead one worked on, or None, ``on_idle`` when there
    is one more who could work, ``on_unstarted`` with the reason why one could not be started; that
    is tried again.

    Attributes:
        target: How many are wanted now, at most ``limit``.
        num_lost: How many died.
    """

    def __init__(
        self,
        *,
        limit: int,
        spawn: Spawn,
        main: Callable[[socket.socket], None],
        selector: selectors.BaseSelector,
        on_message: Callable[[object], None],
        on_lost: Callable[[ChunkKey | None], None],
        on_idle: Callable[[], None],
        on_unstarted: Callable[[OSError], None] = lambda error: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.target = limit
        self._spawn = spawn
        self._main = main
        self._selector = selector
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_idle = on_idle
        self._on_unstarted = on_unstarted
        self._clock = clock
        self._workers: dict[int, _Worker] = {}
        self._idle: list[_Worker] = []  # the one that was at work last is the next to be
        self._num_fresh = 0
        self._ending: set[int] = set()
        self._waiting: deque[MeasureSample | ProduceChunk] = deque()  # for somebody to do it
        self._retry_s = 0.0
        self.num_lost = 0

    @property
    def pids(self) -> tuple[int, ...]:
        """Pids of the preprocessors that run."""
        return tuple(self._workers)

    @property
    def num_running(self) -> int:
        """Number of the preprocessors that run."""
        return len(self._workers)

    @property
    def channels(self) -> tuple[Port, ...]:
        """Their channels."""
        return tuple(worker.channel for worker in self._workers.values())

    @property
    def num_busy(self) -> int:
        """Number of chunks that preprocessors work on, or would if they could be started."""
        return len(self._waiting) + len(self._workers) - len(self._idle)

    @property
    def has_fresh(self) -> bool:
        """Whether some have yet to finish their first chunk: they still load the data sets."""
        return self._num_fresh > 0

    def has_room(self) -> bool:
        """Returns whether one more chunk could be worked on."""
        return self.num_busy < self.target

    def give(self, work: MeasureSample | ProduceChunk) -> None:
        """Hands work to an idle preprocessor, or to a new one; call only if there is room."""
        self._waiting.append(work)
        self._give_to_idle()
        if self._waiting:
            self._start_for_waiting()

    def resume(self, *, end_idle: bool) -> None:
        """Tries again what could not be done; ends those who have been idle for long.

        To be called now and then: nothing tells when that is over.
        """
        if self._waiting and self._clock() >= self._retry_s:
            self._start_for_waiting()
        for channel in self.channels:
            channel.resume()
        while end_idle and self._idle and self._clock() - self._idle[0].since >= IDLE_S:
            worker = self._idle.pop(0)
            self._remove(worker)
            worker.channel.close()  # it exits when it notices
            self._ending.add(worker.pid)

    def kill_stuck(self, limit_s: float) -> None:
        """Kills those who have worked on one sample for so long; others try it again."""

        def is_stuck(worker: _Worker) -> bool:
            return worker.key is not None and self._clock() - worker.since >= limit_s

        for worker in filter(is_stuck, list(self._workers.values())):
            worker.channel.drain()  # if we were away, it may be done
            if is_stuck(worker):
                self._kill(worker)
                worker.since = self._clock()  # once is enough

    def child_died(self, pid: int) -> bool:
        """Tells that a child was reaped; returns whether it was a preprocessor of this pool."""
        worker = self._workers.get(pid)
        if worker is None:
            known = pid in self._ending
            self._ending.discard(pid)
            return known
        worker.channel.drain()  # perhaps it finished a chunk before it died
        worker.channel.close()
        self._remove(worker)
        if worker in self._idle:
            self._idle.remove(worker)
        self.num_lost += 1
        self._on_lost(worker.key)
        return True

    def close(self) -> None:
        """Closes the sockets; preprocessors exit when they notice."""
        for worker in self._workers.values():
            worker.channel.close()
        self._ending.update(self._workers)
        self._workers.clear()
        self._idle.clear()

    def _give_to_idle(self) -> None:
        while self._waiting and self._idle:
            worker, work = self._idle.pop(), self._waiting.popleft()
            worker.key, worker.since = work.key, self._clock()
            worker.channel.send(work)

    def _start_for_waiting(self) -> None:
        try:
            while self._waiting:
                self._start()
                self._give_to_idle()
        except OSError as error:
            self._retry_s = self._clock() + _RETRY_AFTER_S
            self._on_unstarted(error)

    def _start(self) -> None:
        pid, sock = self._spawn(self._main)
        channel = Port(
            sock,
            self._selector,
            on_message=lambda message: self._received(worker, message),
            on_close=lambda: self._cut_off(worker),
        )
        worker = self._workers[pid] = _Worker(pid, channel, since=self._clock())
        self._idle.append(worker)
        self._num_fresh += 1

    def _received(self, worker: _Worker, message: object) -> None:
        if isinstance(message, AtWork):
            worker.since = self._clock()
            return
        try:
            self._on_message(message)
        except Exception:
            self._kill(worker)  # and what it was at is lost with it
            raise
        self._num_fresh -= worker.is_fresh
        worker.key, worker.since, worker.is_fresh = None, self._clock(), False
        if not worker.is_cut_off:
            self._idle.append(worker)
            self._give_to_idle()
            self._on_idle()

    def _cut_off(self, worker: _Worker) -> None:
        # What it may write to is free when it is reaped, and not before.
        worker.is_cut_off = True
        if worker in self._idle:
            self._idle.remove(worker)
        self._kill(worker)

    def _kill(self, worker: _Worker) -> None:
        with suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGKILL)

    def _remove(self, worker: _Worker) -> None:
        del self._workers[worker.pid]
        self._num_fresh -= worker.is_fresh
