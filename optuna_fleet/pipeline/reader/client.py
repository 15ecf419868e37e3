"""A trainer's side of the pipeline."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from typing import Any

from optuna_fleet.exceptions import FleetError, PipelineLostError, PreprocessingError
from optuna_fleet.pipeline import wire
from optuna_fleet.pipeline.chunks.layout import ChunkView, Part, chunk_in_memory, cut_batch
from optuna_fleet.pipeline.pipeline_messages import (
    Advance,
    ArenaOpened,
    ChunkError,
    ChunkFailed,
    ChunkReady,
    ClosePass,
    OpenPass,
    PassOpened,
    ReleaseChunks,
)
from optuna_fleet.pipeline.preprocessor.sampling import SampleError, Samples
from optuna_fleet.pipeline.reader.mapping import Mapping
from optuna_fleet.pipeline.reader.read_plan import Batches, ReadPlan, planned
from optuna_fleet.pipeline.spec import ChunkKey, PipelineSpec, Source
from optuna_fleet.wire.packing import unpack

FromAgent = PassOpened | ChunkReady | ReleaseChunks | ChunkFailed
"""What the agent says of a pass."""


@dataclass(slots=True)
class _Held:
    """A chunk, its place in the arena if it is no copy, and how often it was spared."""

    view: ChunkView
    place: tuple[int, int] | None
    num_spared: int = 0


class OpenedPass:
    """Reads the chunks of an epoch; for the process that began it.

    Attributes:
        chunk_size: Samples of a chunk; 0 until the agent has told it.
        num_ahead: Chunks that may be asked for ahead.
        is_open: It was not closed, nor was the client.
        has_spared: There are chunks that are to be given back later.
    """

    def __init__(self, client: PipelineClient, number: int) -> None:
        self.chunk_size = 0
        self.num_ahead = 1
        self.is_open = True
        self.has_spared = False
        self._client = client
        self._number = number
        self._cursor = 0
        self._pid = os.getpid()
        self._held: dict[int, _Held] = {}
        self._errors: dict[int, ChunkError] = {}

    def advance(
        self,
        cursor: int,
        *,
        needed: Iterable[int] = (),
        ahead: Iterable[int] = (),
        released: Iterable[int] = (),
        num_consumed: int = 0,
    ) -> None:
        """Tells the agent where the pass is, what it wants, and what it has let go of."""
        self._cursor = cursor
        chunks = tuple(needed), tuple(ahead), tuple(released)
        self._client.send(Advance(self._number, cursor, *chunks, num_consumed))

    def has(self, chunk: int) -> bool:
        """Returns whether a chunk (or the news of its failure) was taken in; takes in nothing."""
        if not self.is_open:
            raise agent_gone()  # the reader was closed
        return chunk in self._held or chunk in self._errors

    def take(self, chunk: int) -> ChunkView:
        """Waits for a chunk that was asked for.

        Raises:
            PreprocessingError: It could not be produced.
        """
        if not self.has(chunk):
            self._client.wait_until(lambda: self.has(chunk))
        if chunk in self._errors:
            raise PreprocessingError(self._errors[chunk].text())
        return self._held[chunk].view

    def let_go(self, before: float, *, patience: int = 0) -> list[int]:
        """Gives back all chunks before one; returns those of them of which the agent is to hear.

        What the user has a view of becomes this process' own, but not the first ``patience``
        times: the next batch is asked for while the last one is still bound to the loop's
        variables.
        """
        if not self.is_open:
            raise agent_gone()
        gone, self.has_spared = [], False
        for chunk, held in [*self._held.items()]:
            if chunk >= before:
                continue
            if held.view.is_used():
                if held.num_spared < patience:
                    held.num_spared += 1
                    self.has_spared = True
                    continue
                self._keep(held)
            elif held.place is not None:
                self._client.mapping.clean(*held.place)
            del self._held[chunk]
            gone.append(chunk)
        return gone

    def close(self, *, num_consumed: int = 0) -> None:
        """Ends it, at its end or before; the agent may drop its chunks. See `ClosePass`."""
        # A generator can be collected in a process that the user's code forked, whose loop goes on
        # in the parent; or when the agent is gone.
        if not self.is_open or self._pid != os.getpid():
            return
        self.let_go(math.inf)
        self.is_open = False
        self._client.forget(self._number)
        closing = ClosePass(pass_id=self._number, num_consumed=num_consumed)
        with suppress(PipelineLostError):
            self._client.send(closing)

    def hear(self, message: FromAgent) -> None:
        """Takes in what the agent says of this pass."""
        match message:
            case ChunkReady():
                self._view(message)
            case PassOpened():
                self.chunk_size, self.num_ahead = message.chunk_size, message.num_ahead
            case ReleaseChunks():
                self._give_back()
            case ChunkFailed():
                self._errors[message.chunk] = message.error

    def _view(self, ready: ChunkReady) -> None:
        _, chunk, address, nbytes, brief = ready
        if chunk not in self._held:
            found = None if brief else self._client.mapping.lend(address, nbytes)
            place = None if found is None else (address, nbytes)
            if found is None:
                found = self._client.mapping.copy(address, nbytes)
            self._held[chunk] = _Held(ChunkView(found), place)
        if self._held[chunk].place is None:
            self.advance(self._cursor, released=[chunk])

    def _give_back(self) -> None:
        """Memory is short: what is in the arena becomes the process' own."""
        lent = [chunk for chunk, held in self._held.items() if held.place is not None]
        for chunk in lent:
            self._keep(self._held[chunk])
        self.advance(self._cursor, released=lent)  # interrupted before, it is all done again
        for chunk in lent:
            self._held[chunk].place = None

    def _keep(self, held: _Held) -> None:
        if held.place is not None:
            self._client.mapping.keep(held.place[0], held.view.chunk)


def agent_gone() -> PipelineLostError:
    """Returns the error for when nobody serves the pipeline any more."""
    return PipelineLostError(
        "The shared pipeline is gone: the process that serves it (in a sweep, the agent of this "
        "node) has ended or was killed. What it printed tells why."
    )


_PATIENCE = 2
"""Steps for which chunks of which the user has views are not given back: then they are copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One rank's share of one global batch.

    Attributes:
        data: What a DataLoader would have given for these samples. None if the share is empty (or
            a dummy of one sample, where that was asked for).
        local_size: Samples in this rank's share.
        global_size: Samples in the whole batch, over all ranks.
    """

    data: Any
    local_size: int
    global_size: int


def read_batches(client: PipelineClient, plan: ReadPlan) -> Iterator[Batch]:
    """Yields the batches of a plan."""
    if plan.first_step >= plan.num_steps:
        return
    collate = client.collate_fn(plan.name)
    reading = _Reading(client, plan)
    try:
        for step in range(plan.first_step, plan.num_steps):
            parts = reading.parts(step)
            # The loop's variables outlive the pass: all of the chunk would be copied.
            is_last = step + 1 == plan.num_steps
            data = cut_batch(parts, collate, copies=is_last) if parts else None
            del parts  # or they would outlive their release, for as long as the user computes
            local_size = plan.local_size(step)
            reading.consumed += local_size
            yield Batch(data=data, local_size=local_size, global_size=plan.size(step))
    finally:
        reading.close()


class _Reading:
    """A pass from its first step to its last.

    Keeps the chunks of the current step, asks for those of the next, gives back the rest as soon
    as the user has no view of them, or a few steps later.

    Attributes:
        consumed: Samples that were read and not yet reported.
    """

    def __init__(self, client: PipelineClient, plan: ReadPlan) -> None:
        self.consumed = 0
        self._client = client
        self._plan = plan
        start = plan.first_step * plan.batch_size
        self._opened = client.open_pass(plan.name, plan.epoch, start, continues=plan.continues)
        self._coming = self._all_chunks()  # that were not asked for yet
        self._asked: list[int] = []  # in order, from the first of the current step on
        self._needed = range(0)

    def parts(self, step: int) -> list[Part]:
        """Returns the pieces of chunks that make up this rank's share of a step."""
        start, stop = self._plan.positions(step)
        if start == stop:
            return []
        needed = self._chunks(start, stop)
        if self._opened.has_spared or needed != self._needed:  # else nothing changes
            self._advance(needed)
        size = self._opened.chunk_size
        return [
            (
                self._opened.take(chunk),
                max(start - chunk * size, 0),
                min(stop - chunk * size, size),
            )
            for chunk in needed
        ]

    def close(self) -> None:
        """Ends the pass and reports it."""
        self._opened.close(num_consumed=self._take_consumed())

    def _take_consumed(self) -> int:
        consumed, self.consumed = self.consumed, 0
        return consumed

    def _chunks(self, start: int, stop: int) -> range:
        size = self._opened.chunk_size
        return range(start // size, -(-stop // size)) if stop > start else range(0)

    def _all_chunks(self) -> Iterator[int]:
        """Yields the chunks in which this rank's shares lie, each once."""
        last = -1
        for step in range(self._plan.first_step, self._plan.num_steps):
            for chunk in self._chunks(*self._plan.positions(step)):
                if chunk > last:
                    yield (last := chunk)

    def _advance(self, needed: range) -> None:
        """Tells the agent what changed, if anything did."""
        cursor, has_moved = needed[0], needed[:1] != self._needed[:1]
        self._needed = needed
        kept = [chunk for chunk in self._asked if chunk >= cursor]
        num_new = len(needed) + self._opened.num_ahead - len(kept)
        new = [*islice(self._coming, max(num_new, 0))]
        self._asked = kept + new
        if not all(map(self._opened.has, needed)):
            self._client.hear()
        missing = [chunk for chunk in needed if not self._opened.has(chunk)]
        released = self._opened.let_go(cursor, patience=_PATIENCE)
        if missing or new or released or has_moved:
            self._opened.advance(
                cursor,
                needed=missing,
                ahead=[chunk for chunk in new if chunk not in needed],
                released=released,
                num_consumed=self._take_consumed(),
            )


_AT_ONCE = int(socket.MSG_DONTWAIT)


class PipelineClient:
    """Reads the shared data sets; for one thread of one trainer process.

    Its socket is one end of a pair whose other end the ``PipelineServer`` has.

    Attributes:
        spec: The description of the data sets.
        waited_s: Seconds spent waiting for data so far.
    """

    def __init__(self, sock: socket.socket, spec: PipelineSpec) -> None:
        sock.setblocking(True)
        self._sock = sock
        self.spec = spec
        self._numbers = count(1)
        self._passes: dict[int, OpenedPass] = {}
        self._mapping: Mapping | None = None
        self._collates: dict[str, Callable[[list[Any]], Any] | None] = {}
        self.waited_s = 0.0
        self._run_id: int | None = None
        self._at_wait: Callable[[], object] = lambda: None

    def begin(self, run_id: int, at_wait: Callable[[], object]) -> None:
        """Read for a run; `at_wait`, and nothing else, is called when a wait begins or ends."""
        self._run_id, self._at_wait = run_id, at_wait

    def read(self, name: str, **arguments: Any) -> Batches[Batch]:
        """Returns one epoch of a data set in batches; the arguments are those of `ReadPlan`."""
        return Batches(planned(self.spec, name, **arguments), partial(read_batches, self))

    def finisher(self, name: str) -> Callable[[Any], Any] | None:
        """Returns what is left to do with each batch where the trial computes; None if nothing."""
        packed = self.spec.dataset(name).finish
        return None if packed is None else unpack(packed)

    def collate_fn(self, name: str) -> Callable[[list[Any]], Any] | None:
        """Returns the user's ``collate_fn`` for a data set, if there is one."""
        if name not in self._collates:
            packed = self.spec.dataset(name).collate
            self._collates[name] = None if packed is None else unpack(packed)
        return self._collates[name]

    def open_pass(
        self, name: str, epoch: int, start: int, *, continues: bool = False
    ) -> OpenedPass:
        """Begins to read at sample ``start`` of the canonical order of an epoch."""
        number = next(self._numbers)
        opened = self._passes[number] = OpenedPass(self, number)
        try:
            self.send(
                OpenPass(
                    pass_id=number,
                    name=name,
                    epoch=epoch,
                    start=start,
                    continues=continues,
                    run_id=self._run_id,
                )
            )
            self.wait_until(lambda: opened.chunk_size > 0)
        except BaseException:
            opened.close()
            raise
        return opened

    def fileno(self) -> int:
        """Returns the descriptor that becomes readable when there is something to `hear`."""
        return self._sock.fileno()

    def hear(self) -> None:
        """Takes in what has arrived, without waiting."""
        with suppress(BlockingIOError):
            while True:
                self._receive(_AT_ONCE)

    def close(self) -> None:
        """Gives everything back; batches that were read stay valid."""
        for opened in list(self._passes.values()):
            opened.close()
        if self._mapping is not None:
            self._mapping.close()

    # For passes

    @property
    def mapping(self) -> Mapping:
        """The arena; something was received before."""
        assert self._mapping is not None
        return self._mapping

    def forget(self, number: int) -> None:
        """A pass is closed: what comes of it is of no use."""
        del self._passes[number]

    def send(self, message: object) -> None:
        """Tells the agent."""
        try:
            wire.send(self._sock, message)
        except OSError as error:
            raise agent_gone() from error

    def wait_until(self, arrived: Callable[[], bool]) -> None:
        """Takes in what the agent says until something is so."""
        if arrived():
            return
        begin = time.perf_counter()
        self._at_wait()
        try:
            while not arrived():
                self._receive()
        finally:
            self.waited_s += time.perf_counter() - begin
            self._at_wait()

    def _receive(self, flags: int = 0) -> None:
        try:
            if self._mapping is None:
                self._open_arena()
            # It stays the first until it is heard: Ctrl-C may come, and another pass wait for it.
            message = wire.receive(self._sock, flags | socket.MSG_PEEK)
        except EOFError:
            raise agent_gone() from None
        assert isinstance(message, FromAgent)
        if (opened := self._passes.get(message.pass_id)) is not None:
            opened.hear(message)
        self._sock.recv(1)

    def _open_arena(self) -> None:
        message, descriptors = wire.peek_first(self._sock)
        assert isinstance(message, ArenaOpened)
        if not descriptors:
            raise FleetError(
                "This process has too many open files to be given any data: close some, or raise "
                "the limit (ulimit -n)."
            )
        wire.receive(self._sock)
        self._mapping = Mapping(message.nbytes, *descriptors)


class InlineClient:
    """Stands in for `PipelineClient`: the same batches, made in the calling process.

    Breakpoints in a data set's code are hit, and its exceptions arrive as they were raised.
    """

    waited_s = 0.0

    def __init__(self, spec: PipelineSpec, source: Source, collates: dict[str, Any]) -> None:
        self.spec = spec
        self._collates = collates
        self._samples = Samples(lambda: source, spec)

    def finisher(self, name: str) -> None:
        """Samples are finished."""

    def read(self, name: str, **arguments: Any) -> Batches[Batch]:
        """Returns one epoch; the arguments are those of `ReadPlan`."""
        return Batches(planned(self.spec, name, **arguments), self._made)

    def _made(self, plan: ReadPlan) -> Iterator[Batch]:
        for step in range(plan.first_step, plan.num_steps):
            yield self._batch(plan, step)

    def _batch(self, plan: ReadPlan, step: int) -> Batch:
        start, stop = plan.positions(step)
        with self._samples.lent():
            made = [self._sample(plan, position) for position in range(start, stop)]
        collate = self._collates.get(plan.name)
        # By way of a chunk, so that batches look exactly as they do from processes.
        view = ChunkView(chunk_in_memory(made, collated_by_user=collate is not None))
        return Batch(
            data=cut_batch([(view, 0, len(made))], collate),
            local_size=plan.local_size(step),
            global_size=plan.size(step),
        )

    def _sample(self, plan: ReadPlan, position: int) -> Any:
        try:
            return self._samples.sample(ChunkKey(plan.name, plan.epoch, 0), position)
        except SampleError as failure:
            raise failure.__cause__ or failure from None
