"""The agent's side of the pipeline: serves trainers what the scheduler grants them."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Hashable

from optuna_fleet.exceptions import ProtocolError
from optuna_fleet.pipeline.exchange import Peers
from optuna_fleet.pipeline.pipeline_messages import (
    Advance,
    ArenaOpened,
    AskForStats,
    ClosePass,
    OpenPass,
    PassId,
    PassOpened,
    PipelineStats,
)
from optuna_fleet.pipeline.preprocessor.payload import PipelineSetup
from optuna_fleet.pipeline.server.making import Making
from optuna_fleet.pipeline.server.workers import Spawn
from optuna_fleet.pipeline.spec import EpochKey
from optuna_fleet.pipeline.wire import Port, close_ports_in_child

_MOST_AHEAD = 16
"""Chunks that a reader may ask for before it needs them, if they are small."""


class PipelineServer:
    """Serves trainers from one set of chunks, and keeps preprocessors at work. Never blocks.

    Its sockets register themselves with ``selector``, with a callable as ``data``: the agent's
    loop is ``for key, mask in selector.select(timeout): key.data(mask)``. Preprocessors are
    started when there is work for them. The file with the data sets is the server's from now on.
    ``notify`` is given a sentence that the user should read, now and then, by `resume`.
    """

    def __init__(
        self,
        setup: PipelineSetup,
        *,
        spawn: Spawn,
        selector: selectors.BaseSelector,
        notify: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
        peers: Peers | None = None,
    ) -> None:
        self._selector = selector
        self._notify = notify
        self._shares = not setup.num_alone
        self._making = Making(
            setup,
            spawn=spawn,
            selector=selector,
            on_idle=self._work,
            clock=clock,
            peers=peers,
        )
        self._scheduler = self._making.scheduler
        self._readers: dict[Hashable, Port] = {}
        self._unopened: dict[PassId, OpenPass] = {}

    # For the agent

    def add_reader(self, reader_id: Hashable, sock: socket.socket) -> None:
        """Serves the trainer at the other end of ``sock``, which is the server's from now on."""
        channel = self._readers[reader_id] = Port(
            sock,
            self._selector,
            on_message=lambda message: self._from_reader(reader_id, message),
            on_close=lambda: self.remove_reader(reader_id),
        )
        arena = self._making.arena
        channel.send(ArenaOpened(nbytes=arena.nbytes), [arena.descriptor])

    def remove_reader(self, reader_id: Hashable) -> None:
        """Forgets a trainer, dead or done; what it held is free. Harmless if it is unknown."""
        channel = self._readers.pop(reader_id, None)
        if channel is None:
            return
        channel.close()
        for pass_id in [*self._unopened, *self._scheduler.passes]:
            if pass_id[0] == reader_id:
                self._end_pass(pass_id)
        self._work()

    def child_died(self, pid: int) -> None:
        """Tells that a child was reaped, which may be a preprocessor of this server."""
        self._making.workers.child_died(pid)

    def kill_stuck(self, limit_s: float) -> None:
        """Ends preprocessors that have worked on one sample for so many seconds.

        Three that got stuck in a chunk make it an error.
        """
        self._making.workers.kill_stuck(limit_s)

    def resume(self) -> None:
        """Tries again what could not be done for want of processes or memory.

        To be called now and then: nothing tells when that is over. What there is to tell the user
        is told now: what goes wrong with that is not the fault of whoever was the cause.
        """
        self._making.resume()
        self._work()
        while notices := self._making.notices:
            self._notify(notices.pop(0))

    @property
    def preprocessor_pids(self) -> tuple[int, ...]:
        """Pids of the preprocessors that run."""
        return self._making.workers.pids

    def stats(self) -> PipelineStats:
        """Returns what was done so far."""
        return self._making.stats()

    def close(self) -> None:
        """Frees all memory and cuts everyone off.

        Preprocessors exit when they notice, trainers' reads raise. The agent reaps.
        """
        for channel in self._readers.values():
            channel.close()
        self._readers.clear()
        self._making.close()

    def close_in_child(self) -> None:
        """Closes what a forked child inherited: every trainer calls it first of all."""
        close_ports_in_child(self._selector)
        self._making.close_files()

    # From trainers

    def _from_reader(self, reader_id: Hashable, message: object) -> None:
        match message:
            case Advance():
                self._advance((reader_id, message.pass_id), message)
            case OpenPass():
                self._open((reader_id, message.pass_id), message)
            case AskForStats():
                self._readers[reader_id].send(self.stats())
            case ClosePass():
                self._making.counts.consumed += message.num_consumed
                self._end_pass((reader_id, message.pass_id))
            case _:
                raise ProtocolError(f"A trainer sent the pipeline an unexpected {message!r}.")
        self._work()

    def _work(self) -> None:
        """Does what follows from an event: opens passes, orders chunks, tells readers."""
        for pass_id, opening in [*self._unopened.items()]:
            self._open(pass_id, opening)
        self._making.work()
        while self._scheduler.outbox:
            reader_id, message = self._scheduler.outbox.popleft()
            if (channel := self._readers.get(reader_id)) is not None:
                channel.send(message)

    def _open(self, pass_id: PassId, message: OpenPass) -> None:
        if not self._making.knows(message.name):
            # How many samples make a chunk is known once one of them has been preprocessed.
            self._unopened[pass_id] = message
            return
        self._unopened.pop(pass_id, None)
        key = EpochKey(message.name, message.epoch, None if self._shares else message.run_id)
        size = self._scheduler.sizes[message.name]
        cursor = message.start // size.chunk_size
        self._scheduler.open_pass(pass_id, key, cursor, continues=message.continues)
        num_ahead = max(1, self._making.chunk_bytes // size.chunk_bytes)
        opened = PassOpened(
            pass_id=message.pass_id,
            chunk_size=size.chunk_size,
            num_ahead=min(num_ahead, _MOST_AHEAD),
        )
        self._readers[pass_id[0]].send(opened)

    def _advance(self, pass_id: PassId, message: Advance) -> None:
        self._making.counts.consumed += message.num_consumed
        self._scheduler.move(pass_id, message.cursor)
        self._scheduler.release(pass_id, message.released)
        for chunk in message.needed:
            self._scheduler.request(pass_id, chunk, urgent=True)
        for chunk in message.ahead:
            self._scheduler.request(pass_id, chunk, urgent=False)

    def _end_pass(self, pass_id: PassId) -> None:
        self._unopened.pop(pass_id, None)
        if pass_id in self._scheduler.passes:
            self._scheduler.close_pass(pass_id)
