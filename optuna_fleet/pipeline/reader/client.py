"""A trainer's side of the pipeline."""

from __future__ import annotations

import operator
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from optuna_fleet.arguments import check_number, check_that, is_a
from optuna_fleet.exceptions import FleetError, PreprocessingError
from optuna_fleet.pipeline import wire
from optuna_fleet.pipeline.chunks.view import ChunkView
from optuna_fleet.pipeline.messages import (
    Advance,
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
from optuna_fleet.pipeline.reader.batches import Batches, ReadPlan
from optuna_fleet.pipeline.spec import PipelineSpec
from optuna_fleet.wire.packing import unpack

_FromAgent = PassOpened | HeadFound | ChunkReady | ReleaseChunks | ChunkFailed
_AT_ONCE = int(socket.MSG_DONTWAIT)


@dataclass(slots=True)
class _Inbox:
    """What has arrived for a pass, which the process ``pid`` began."""

    pid: int = field(default_factory=os.getpid)
    chunk_size: int | None = None
    head: tuple[int, int] | None = None
    chunks: dict[int, ChunkView] = field(default_factory=dict)
    errors: dict[int, ChunkError] = field(default_factory=dict)


class PipelineClient:
    """Reads the shared data sets; for one thread of one trainer process.

    Args:
        sock: The trainer's end of the socket pair whose other end the ``PipelineServer`` has.
        spec: The description of the data sets.

    Attributes:
        waited_s: Seconds spent waiting for data so far.
        at_wait: Called when such a wait begins, and when it ends.
    """

    def __init__(self, sock: socket.socket, spec: PipelineSpec) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._spec = spec
        self._inboxes: dict[int, _Inbox] = {}
        self._num_passes = 0
        self._collates: dict[str, Callable[[list[Any]], Any] | None] = {}
        self.waited_s = 0.0
        self.at_wait: Callable[[], object] = lambda: None

    def sample_count(self, name: str) -> int:
        """Returns the length of a data set.

        Raises:
            FleetConfigError: There is no data set of that name.
        """
        return self._spec.dataset(name).num_samples

    def is_shuffled(self, name: str) -> bool:
        """Returns whether each epoch of a data set has an order of its own.

        Raises:
            FleetConfigError: There is no data set of that name.
        """
        return self._spec.dataset(name).shuffled

    def read(
        self,
        name: str,
        *,
        epoch: int,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        dummy: bool = False,
        first_step: int = 0,
        continues: bool = False,
        origin: int | None = 0,
    ) -> Batches:
        """Returns one epoch of a data set in batches, or one rank's shard of each of them.

        Args:
            name: The data set.
            epoch: From 0. A fixed data set is the same in all of them.
            batch_size: Samples per global batch, over all ranks.
            rank: Whose shard to read. The first ``size % world_size`` ranks get one sample more.
            world_size: Number of ranks that share each batch.
            drop_last: Leave out the last batch if it is smaller than the others.
            dummy: Where the shard is empty, give the batch's first sample as data instead of None;
                ``local_size`` is 0 all the same.
            first_step: Batches to skip, for a trial that resumes within an epoch.
            continues: The next epoch will be read too: its beginning is preprocessed in good time.
            origin: The sample of the epoch to begin with; the pass goes on into the next epoch
                until it has had all. None for where `head` is when it begins.

        Raises:
            FleetConfigError: An argument can't work.
        """
        return Batches(
            self,
            planned(
                self._spec,
                name,
                epoch=epoch,
                batch_size=batch_size,
                rank=rank,
                world_size=world_size,
                drop_last=drop_last,
                dummy=dummy,
                first_step=first_step,
                continues=continues,
                origin=origin,
            ),
        )

    def rolls(self, name: str) -> bool:
        """Returns whether a pass over a data set begins at its `head`.

        Raises:
            FleetConfigError: There is no data set of that name.
        """
        return self._spec.rolls(name)

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
        packed = self._spec.dataset(name).finish
        return None if packed is None else unpack(packed)

    # For Batches

    def collate_fn(self, name: str) -> Callable[[list[Any]], Any] | None:
        """Returns the user's ``collate_fn`` for a data set, if there is one."""
        if name not in self._collates:
            packed = self._spec.dataset(name).collate
            self._collates[name] = None if packed is None else unpack(packed)
        return self._collates[name]

    def open_pass(
        self, name: str, epoch: int, start: int, *, continues: bool = False
    ) -> tuple[int, int]:
        """Begins to read at position ``start``; returns the pass' number and the chunk size."""
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
        return number, inbox.chunk_size

    def _inbox(self) -> tuple[int, _Inbox]:
        self._num_passes += 1
        inbox = self._inboxes[self._num_passes] = _Inbox()
        return self._num_passes, inbox

    def advance(self, message: Advance) -> None:
        """Tells the agent where the pass is and what it wants; released chunks are forgotten."""
        chunks = self._inboxes[message.pass_id].chunks
        for chunk in message.released:
            chunks.pop(chunk, None)
        self._send(message)

    def arrived(self, number: int, chunk: int) -> bool:
        """Returns whether a chunk (or the news of its failure) is there, without waiting."""
        inbox = self._inboxes[number]
        while chunk not in inbox.chunks and chunk not in inbox.errors:
            try:
                self._receive(_AT_ONCE)
            except BlockingIOError:
                return False
        return True

    def take(self, number: int, chunk: int) -> ChunkView:
        """Waits for a chunk that was asked for.

        Raises:
            PreprocessingError: It could not be produced.
        """
        inbox = self._inboxes[number]
        self._wait_until(lambda: chunk in inbox.chunks or chunk in inbox.errors)
        if chunk in inbox.errors:
            raise PreprocessingError(inbox.errors[chunk].text())
        return inbox.chunks[chunk]

    def close_pass(self, closing: ClosePass) -> None:
        """Ends a pass, at its end or before; the agent may drop its chunks."""
        inbox = self._inboxes.pop(closing.pass_id, None)
        # A generator can be collected in a process that the user's code forked, whose loop goes on
        # in the parent; or when the agent is gone.
        if inbox is not None and inbox.pid == os.getpid():
            try:
                wire.send(self._sock, closing)
            except OSError:
                return

    def _give_back(self, number: int, chunks: list[int]) -> None:
        """Memory is short: keep copies instead."""
        for chunk in chunks:
            self._inboxes[number].chunks[chunk].detach()
        self._send(ReturnChunks(pass_id=number, chunks=tuple(chunks)))

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
            message, fd = wire.receive(self._sock, flags)
        except EOFError:
            raise _agent_gone() from None
        assert isinstance(message, _FromAgent)
        inbox = self._inboxes.get(message.pass_id)
        if inbox is None:
            if fd is not None:
                os.close(fd)  # of a pass that was ended early
            return
        self._put(inbox, message, fd)

    def _put(self, inbox: _Inbox, message: _FromAgent, fd: int | None) -> None:
        match message:
            case PassOpened():
                inbox.chunk_size = message.chunk_size
            case HeadFound():
                inbox.head = message.epoch, message.start
            case ChunkReady():
                if fd is None:
                    raise FleetError(
                        "This process has too many open files to be given more data: close some, "
                        "or raise the limit (ulimit -n)."
                    )
                inbox.chunks[message.chunk] = _view(fd)
                if message.brief:
                    self._give_back(message.pass_id, [message.chunk])
            case ReleaseChunks():
                self._give_back(message.pass_id, list(inbox.chunks))
            case ChunkFailed():
                inbox.errors[message.chunk] = message.error


def planned(
    spec: PipelineSpec,
    name: str,
    *,
    epoch: int,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    drop_last: bool = False,
    dummy: bool = False,
    first_step: int = 0,
    continues: bool = False,
    origin: int | None = 0,
) -> ReadPlan:
    """Returns the checked arguments of ``PipelineClient.read``.

    Raises:
        FleetConfigError: An argument can't work.
    """
    dataset = spec.dataset(name)
    check_that("drop_last", drop_last, is_a(bool), "be True or False")
    plan = ReadPlan(
        name=name,
        epoch=dataset.canonical_epoch(_at_least(0, epoch=epoch)),
        num_samples=dataset.num_samples,
        batch_size=_at_least(1, batch_size=batch_size),
        rank=_at_least(0, rank=rank),
        world_size=_at_least(1, world_size=world_size),
        drop_last=drop_last,
        dummy=dummy,
        first_step=_at_least(0, first_step=first_step),
        continues=continues and dataset.shuffled,
        origin=origin,
    )
    plan.check()
    return plan


def _view(fd: int) -> ChunkView:
    try:
        return ChunkView(fd)
    except OSError as error:
        raise FleetError(
            f"This process can map no more data ({error}). Each batch that is kept keeps a "
            "mapping, of which a process may have so many (vm.max_map_count): keep copies "
            "(`x.clone()`) instead."
        ) from error


def _agent_gone() -> FleetError:
    return FleetError(
        "The shared pipeline is gone: the process that serves it (in a sweep, the agent of this "
        "node) has ended or was killed. What it printed tells why."
    )


def _at_least(minimum: int, **argument: Any) -> int:
    ((name, value),) = argument.items()
    check_number(name, value, least=minimum, whole=True)
    return operator.index(value)
