"""A trainer's side of the pipeline."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from optuna_fleet.exceptions import FleetError, PreprocessingError
from optuna_fleet.pipeline import wire
from optuna_fleet.pipeline.chunks.view import ChunkView
from optuna_fleet.pipeline.messages import (
    Advance,
    ArenaOpened,
    ChunkError,
    ChunkFailed,
    ChunkReady,
    ClosePass,
    FindHead,
    HeadFound,
    OpenPass,
    PassOpened,
    ReleaseChunks,
    ReturnChunks,
)
from optuna_fleet.pipeline.reader.batches import Batches
from optuna_fleet.pipeline.reader.mapping import Mapping
from optuna_fleet.pipeline.reader.plan import planned
from optuna_fleet.pipeline.spec import PipelineSpec
from optuna_fleet.wire.packing import unpack

_FromAgent = PassOpened | HeadFound | ChunkReady | ReleaseChunks | ChunkFailed
_AT_ONCE = int(socket.MSG_DONTWAIT)


@dataclass(slots=True)
class _Inbox:
    """What has arrived for a pass, which the process ``pid`` began.

    Attributes:
        chunks: The chunks.
        places: Where in the arena those are that are not copies.
    """

    pid: int = field(default_factory=os.getpid)
    chunk_size: int | None = None
    head: tuple[int, int] | None = None
    num_ahead: int = 1
    chunks: dict[int, ChunkView] = field(default_factory=dict)
    places: dict[int, tuple[int, int]] = field(default_factory=dict)
    errors: dict[int, ChunkError] = field(default_factory=dict)


class PipelineClient:
    """Reads the shared data sets; for one thread of one trainer process.

    Args:
        sock: The trainer's end of the socket pair whose other end the ``PipelineServer`` has.
        spec: The description of the data sets.

    Attributes:
        spec: Likewise.
        waited_s: Seconds spent waiting for data so far.
        at_wait: Called when such a wait begins, and when it ends.
    """

    def __init__(self, sock: socket.socket, spec: PipelineSpec) -> None:
        sock.setblocking(True)
        self._sock = sock
        self.spec = spec
        self._inboxes: dict[int, _Inbox] = {}
        self._num_passes = 0
        self._mapping: Mapping | None = None
        self._collates: dict[str, Callable[[list[Any]], Any] | None] = {}
        self.waited_s = 0.0
        self.at_wait: Callable[[], object] = lambda: None

    def read(self, name: str, **arguments: Any) -> Batches:
        """Returns one epoch of a data set in batches; the arguments are those of `ReadPlan`."""
        return Batches(self, planned(self.spec, name, **arguments))

    def rolls(self, name: str) -> bool:
        """Returns whether a pass over a data set begins at its `head`.

        Raises:
            FleetConfigError: There is no data set of that name.
        """
        return self.spec.rolls(name)

    def head(self, name: str) -> tuple[int, int]:
        """Returns the epoch and the sample in it up to which a data set has been read."""
        number, inbox = self._inbox()
        try:
            self._send(FindHead(pass_id=number, name=name))
            self._wait_until(lambda: inbox.head is not None)
        finally:
            del self._inboxes[number]
        assert inbox.head is not None
        return inbox.head

    def finisher(self, name: str) -> Callable[[Any], Any] | None:
        """Returns what is left to do with each batch where the trial computes; None if nothing."""
        packed = self.spec.dataset(name).finish
        return None if packed is None else unpack(packed)

    def close(self) -> None:
        """Gives everything back; batches that were read stay valid."""
        for number in list(self._inboxes):
            self.close_pass(ClosePass(pass_id=number, num_consumed=0, waited_s=0.0))
        if self._mapping is not None:
            self._mapping.close()

    # For Batches

    def collate_fn(self, name: str) -> Callable[[list[Any]], Any] | None:
        """Returns the user's ``collate_fn`` for a data set, if there is one."""
        if name not in self._collates:
            packed = self.spec.dataset(name).collate
            self._collates[name] = None if packed is None else unpack(packed)
        return self._collates[name]

    def open_pass(
        self, name: str, epoch: int, start: int, *, continues: bool = False
    ) -> tuple[int, int, int]:
        """Begins to read at position ``start``.

        Returns:
            The pass' number, the chunk size, and how many chunks may be asked for ahead.
        """
        number, inbox = self._inbox()
        try:
            self._send(
                OpenPass(pass_id=number, name=name, epoch=epoch, start=start, continues=continues)
            )
            self._wait_until(lambda: inbox.chunk_size is not None)
        except BaseException:
            self.close_pass(ClosePass(pass_id=number, num_consumed=0, waited_s=0.0))
            raise
        assert inbox.chunk_size is not None
        return number, inbox.chunk_size, inbox.num_ahead

    def _inbox(self) -> tuple[int, _Inbox]:
        self._num_passes += 1
        inbox = self._inboxes[self._num_passes] = _Inbox()
        return self._num_passes, inbox

    def _inbox_of(self, number: int) -> _Inbox:
        if number not in self._inboxes:
            raise _agent_gone()  # the reader was closed
        return self._inboxes[number]

    def advance(self, message: Advance) -> None:
        """Tells the agent where the pass is, what it wants, and what it has let go of."""
        self._send(message)

    def let_go(self, number: int, chunks: Iterable[int], *, patient: bool) -> list[int]:
        """Has chunks be written anew; returns those of them of which the agent may be told.

        Args:
            number: The pass.
            chunks: What it needs no more.
            patient: Not those of which the user has a view: the next batch is asked for while the
                last one is still bound to the loop's variables. Otherwise they are kept for him.
        """
        inbox = self._inbox_of(number)
        gone = []
        for chunk in chunks:
            view = inbox.chunks.get(chunk)
            if view is not None and view.is_used():
                if patient:
                    continue
                self._keep(inbox, chunk)
            elif chunk in inbox.places:
                assert self._mapping is not None
                self._mapping.clean(*inbox.places[chunk])
            inbox.chunks.pop(chunk, None)
            inbox.places.pop(chunk, None)
            gone.append(chunk)
        return gone

    def arrived(self, number: int, chunk: int) -> bool:
        """Returns whether a chunk (or the news of its failure) is there, without waiting."""
        while not self.has(number, chunk):
            try:
                self._receive(_AT_ONCE)
            except BlockingIOError:
                return False
        return True

    def has(self, number: int, chunk: int) -> bool:
        """Returns whether a chunk (or the news of its failure) was taken in; takes in nothing."""
        inbox = self._inbox_of(number)
        return chunk in inbox.chunks or chunk in inbox.errors

    def fileno(self) -> int:
        """Returns the descriptor that becomes readable when there is something to `hear`."""
        return self._sock.fileno()

    def hear(self) -> None:
        """Takes in what has arrived, without waiting."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._receive(_AT_ONCE)

    def take(self, number: int, chunk: int) -> ChunkView:
        """Waits for a chunk that was asked for.

        Raises:
            PreprocessingError: It could not be produced.
        """
        inbox = self._inbox_of(number)
        self._wait_until(lambda: chunk in inbox.chunks or chunk in inbox.errors)
        if chunk in inbox.errors:
            raise PreprocessingError(inbox.errors[chunk].text())
        return inbox.chunks[chunk]

    def close_pass(self, closing: ClosePass) -> None:
        """Ends a pass, at its end or before; the agent may drop its chunks."""
        inbox = self._inboxes.get(closing.pass_id)
        # A generator can be collected in a process that the user's code forked, whose loop goes on
        # in the parent; or when the agent is gone.
        if inbox is not None and inbox.pid == os.getpid():
            self.let_go(closing.pass_id, list(inbox.chunks), patient=False)
            del self._inboxes[closing.pass_id]
            try:
                wire.send(self._sock, closing)
            except OSError:
                return

    def _give_back(self, number: int) -> None:
        """Memory is short: what is in the arena becomes the process' own."""
        inbox = self._inboxes[number]
        chunks = tuple(inbox.places)
        for chunk in chunks:
            self._keep(inbox, chunk)
        inbox.places.clear()
        self._send(ReturnChunks(pass_id=number, chunks=chunks))

    def _keep(self, inbox: _Inbox, chunk: int) -> None:
        if chunk in inbox.places:
            assert self._mapping is not None
            self._mapping.keep(inbox.places[chunk][0], inbox.chunks[chunk].chunk)

    def _send(self, message: object) -> None:
        try:
            wire.send(self._sock, message)
        except OSError as error:
            raise _agent_gone() from error

    def _wait_until(self, arrived: Callable[[], bool]) -> None:
        if arrived():
            return
        begin = time.perf_counter()
        self.at_wait()
        try:
            while not arrived():
                self._receive()
        finally:
            self.waited_s += time.perf_counter() - begin
            self.at_wait()

    def _receive(self, flags: int = 0) -> None:
        try:
            if self._mapping is None:
                self._open_arena()
            message = wire.receive(self._sock, flags)
        except EOFError:
            raise _agent_gone() from None
        assert isinstance(message, _FromAgent)
        inbox = self._inboxes.get(message.pass_id)
        if inbox is not None:  # of a pass that was not ended early
            self._put(inbox, message)

    def _open_arena(self) -> None:
        message, descriptors = wire.receive_first(self._sock)
        assert isinstance(message, ArenaOpened)
        if len(descriptors) < message.extents.num_files:
            raise FleetError(
                "This process has too many open files to be given any data: close some, or raise "
                "the limit (ulimit -n)."
            )
        self._mapping = Mapping(message.extents, descriptors)

    def _put(self, inbox: _Inbox, message: _FromAgent) -> None:
        match message:
            case ChunkReady():
                self._view(inbox, message)
            case PassOpened():
                inbox.chunk_size, inbox.num_ahead = message.chunk_size, message.num_ahead
            case HeadFound():
                inbox.head = message.epoch, message.start
            case ReleaseChunks():
                self._give_back(message.pass_id)
            case ChunkFailed():
                inbox.errors[message.chunk] = message.error

    def _view(self, inbox: _Inbox, ready: ChunkReady) -> None:
        assert self._mapping is not None
        number, chunk, address, nbytes, brief = ready
        found = None if brief else self._mapping.lend(address, nbytes)
        if found is None:
            inbox.chunks[chunk] = ChunkView(self._mapping.copy(address, nbytes))
            self._send(ReturnChunks(pass_id=number, chunks=(chunk,)))
        else:
            inbox.places[chunk] = address, nbytes
            inbox.chunks[chunk] = ChunkView(found)


def _agent_gone() -> FleetError:
    return FleetError(
        "The shared pipeline is gone: the process that serves it (in a sweep, the agent of this "
        "node) has ended or was killed. What it printed tells why."
    )
