"""The preprocessors as the agent sees them: started when there is work, replaced when they die."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field

from optuna_fleet.pipeline.pipeline_messages import AtWork, MeasureSample, ProduceChunk
from optuna_fleet.pipeline.wire import Port

Spawn = Callable[[Callable[[socket.socket], None]], tuple[int, socket.socket]]
"""Forks a child that runs the given main on its end of a ``wire.socket_pair()``, then exits.
Returns the child's pid and our end. The child has closed its copy of our end, and we ours of its
end: either side learns of the other's death by the end of the stream."""

Work = MeasureSample | ProduceChunk

Kind = tuple[str, str]
"""What a process is for: any chunk, the chunks of one stream, or those of other nodes."""

MAKER: Kind = ("maker", "")
FETCHER: Kind = ("fetcher", "")

IDLE_S = 60.0
"""A preprocessor that was idle for so long is ended, where there are as many as are needed."""

_RETRY_AFTER_S = 1.0


@dataclass(slots=True, eq=False)
class _Worker:
    """``since`` it got its work, was done with the last, or said that it works."""

    kind: Kind
    pid: int
    port: Port
    since: float
    work: Work | None = None
    is_fresh: bool = True
    is_cut_off: bool = False

    @property
    def is_idle(self) -> bool:
        return self.work is None and not self.is_cut_off


@dataclass(slots=True, kw_only=True, eq=False)
class Workers:
    """At most ``limit(kind)`` processes of a kind, each with at most one chunk to work on.

    Attributes:
        limit: How many of a kind there may be now.
        spawn: Starts one that runs ``main``.
        on_message: Called with what one says.
        on_lost: Called with what a dead one worked on, or None.
        on_idle: Called when there is one more who could work.
        on_unstarted: Called with the reason why one could not be started; that is tried again.
        num_lost: How many died.
    """

    limit: Callable[[Kind], int]
    spawn: Spawn
    main: Callable[[socket.socket], None]
    selector: selectors.BaseSelector
    on_message: Callable[[object], None]
    on_lost: Callable[[Work | None], None]
    on_idle: Callable[[], None]
    on_unstarted: Callable[[OSError], None] = lambda error: None
    clock: Callable[[], float] = time.monotonic
    num_lost: int = 0
    _workers: dict[int, _Worker] = field(default_factory=dict)
    _waiting: deque[tuple[Kind, Work]] = field(default_factory=deque)
    _retry_s: float = 0.0

    @property
    def pids(self) -> tuple[int, ...]:
        """Pids of those that run."""
        return tuple(self._workers)

    def num_running(self, kind: Kind) -> int:
        """Returns how many of a kind run."""
        return sum(worker.kind == kind for worker in self._workers.values())

    def num_busy(self, kind: Kind) -> int:
        """Returns how many chunks are worked on, or would be if a process could be started."""
        busy = sum(each.kind == kind and not each.is_idle for each in self._workers.values())
        return busy + sum(waiting == kind for waiting, _ in self._waiting)

    def has_fresh(self, kind: Kind) -> bool:
        """Returns whether some have yet to finish their first chunk: they load the data sets."""
        return any(each.is_fresh and each.kind == kind for each in self._workers.values())

    def has_room(self, kind: Kind) -> bool:
        """Returns whether one more chunk could be worked on."""
        return self.num_busy(kind) < self.limit(kind)

    def give(self, kind: Kind, work: Work) -> None:
        """Hands work to an idle one, or to a new one; call only if there is room."""
        self._waiting.append((kind, work))
        self._hand_out()
        if self._waiting:
            self._start_for_waiting()

    def resume(self, *, ending: Collection[Kind]) -> None:
        """Tries again what could not be done; ends those of some kinds who were idle for long.

        To be called now and then: nothing tells when that is over.
        """
        if self._waiting and self.clock() >= self._retry_s:
            self._start_for_waiting()
        for worker in [*self._workers.values()]:
            is_over = worker.is_idle and self.clock() - worker.since >= IDLE_S
            if is_over and worker.kind in ending:
                worker.port.close()  # it exits when it notices
                del self._workers[worker.pid]

    def kill_stuck(self, limit_s: float) -> None:
        """Kills those who have worked on one sample for so long; others try it again."""

        def is_stuck(worker: _Worker) -> bool:
            return worker.work is not None and self.clock() - worker.since >= limit_s

        for worker in filter(is_stuck, list(self._workers.values())):
            worker.port.drain()  # if we were away, it may be done
            if is_stuck(worker):
                _kill(worker)
                worker.since = self.clock()  # once is enough

    def child_died(self, pid: int) -> None:
        """Tells that a child was reaped, which may be one of these."""
        if (worker := self._workers.get(pid)) is None:
            return
        worker.port.drain()  # perhaps it finished a chunk before it died
        worker.port.close()
        del self._workers[pid]
        self.num_lost += 1
        self.on_lost(worker.work)

    def close(self) -> None:
        """Closes the sockets; processes exit when they notice."""
        for worker in self._workers.values():
            worker.port.close()
        self._workers.clear()

    def _hand_out(self) -> None:
        """The one that was at work last is the next to be."""
        for kind, work in [*self._waiting]:
            idle = (each for each in self._workers.values() if each.kind == kind and each.is_idle)
            if worker := max(idle, key=lambda each: each.since, default=None):
                self._waiting.remove((kind, work))
                worker.work, worker.since = work, self.clock()
                worker.port.send(work)

    def _start_for_waiting(self) -> None:
        try:
            while self._waiting:
                self._start(self._waiting[0][0])
                self._hand_out()
        except OSError as error:
            self._retry_s = self.clock() + _RETRY_AFTER_S
            self.on_unstarted(error)

    def _start(self, kind: Kind) -> None:
        pid, sock = self.spawn(self.main)
        port = Port(
            sock,
            self.selector,
            on_message=lambda message: self._received(worker, message),
            on_close=lambda: self._cut_off(worker),
        )
        worker = self._workers[pid] = _Worker(kind, pid, port, self.clock())

    def _received(self, worker: _Worker, message: object) -> None:
        if isinstance(message, AtWork):
            worker.since = self.clock()
            return
        try:
            self.on_message(message)
        except Exception:
            _kill(worker)  # and what it was at is lost with it
            raise
        worker.work, worker.since, worker.is_fresh = None, self.clock(), False
        if not worker.is_cut_off:
            self._hand_out()
            self.on_idle()

    def _cut_off(self, worker: _Worker) -> None:
        # What it may write to is free when it is reaped, and not before.
        worker.is_cut_off = True
        _kill(worker)


def _kill(worker: _Worker) -> None:
    with suppress(ProcessLookupError):
        os.kill(worker.pid, signal.SIGKILL)
