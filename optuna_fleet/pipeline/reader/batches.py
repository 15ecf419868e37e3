"""One pass over one epoch: which samples make each step, and the chunks they come from."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optuna_fleet.exceptions import PipelineLostError, PreprocessingError
from optuna_fleet.pipeline.chunks.chunk_view import ChunkView, Part, cut_batch
from optuna_fleet.pipeline.pipeline_messages import (
    Advance,
    ChunkError,
    ChunkFailed,
    ChunkReady,
    ClosePass,
    PassOpened,
    ReleaseChunks,
)
from optuna_fleet.pipeline.reader.read_plan import ReadPlan

if TYPE_CHECKING:
    from optuna_fleet.pipeline.reader.client import PipelineClient


FromAgent = PassOpened | ChunkReady | ReleaseChunks | ChunkFailed
"""What the agent says of a pass."""


class OpenedPass:
    """Reads the chunks of an epoch; for the process that began it.

    Attributes:
        chunk_size: Samples of a chunk; 0 until the agent has told it.
        num_ahead: Chunks that may be asked for ahead.
        is_open: It was not closed, nor was the client.
    """

    def __init__(self, client: PipelineClient, number: int) -> None:
        self.chunk_size = 0
        self.num_ahead = 1
        self.is_open = True
        self._client = client
        self._number = number
        self._cursor = 0
        self._pid = os.getpid()
        self._chunks: dict[int, ChunkView] = {}
        self._places: dict[int, tuple[int, int]] = {}  # in the arena, of those that are no copies
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
        return chunk in self._chunks or chunk in self._errors

    def take(self, chunk: int) -> ChunkView:
        """Waits for a chunk that was asked for.

        Raises:
            PreprocessingError: It could not be produced.
        """
        if not self.has(chunk):
            self._client.wait_until(lambda: self.has(chunk))
        if chunk in self._errors:
            raise PreprocessingError(self._errors[chunk].text())
        return self._chunks[chunk]

    def let_go(self, chunks: Iterable[int], *, patient: bool) -> list[int]:
        """Has chunks be written anew; returns those of them of which the agent may be told.

        Args:
            chunks: What is needed no more.
            patient: Not those of which the user has a view: the next batch is asked for while the
                last one is still bound to the loop's variables. Otherwise they are kept for him.
        """
        if not self.is_open:
            raise agent_gone()
        gone = []
        for chunk in chunks:
            view = self._chunks.get(chunk)
            if view is not None and view.is_used():
                if patient:
                    continue
                self._keep(chunk)
            elif chunk in self._places:
                self._client.mapping.clean(*self._places[chunk])
            self._chunks.pop(chunk, None)
            self._places.pop(chunk, None)
            gone.append(chunk)
        return gone

    def close(self, *, num_consumed: int = 0) -> None:
        """Ends it, at its end or before; the agent may drop its chunks. See `ClosePass`."""
        # A generator can be collected in a process that the user's code forked, whose loop goes on
        # in the parent; or when the agent is gone.
        if not self.is_open or self._pid != os.getpid():
            return
        self.let_go(list(self._chunks), patient=False)
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
        if chunk not in self._chunks:
            found = None if brief else self._client.mapping.lend(address, nbytes)
            if found is not None:
                self._places[chunk] = address, nbytes
            else:
                found = self._client.mapping.copy(address, nbytes)
            self._chunks[chunk] = ChunkView(found)
        if chunk not in self._places:
            self.advance(self._cursor, released=[chunk])

    def _give_back(self) -> None:
        """Memory is short: what is in the arena becomes the process' own."""
        chunks = tuple(self._places)
        for chunk in chunks:
            self._keep(chunk)
        self._places.clear()
        self.advance(self._cursor, released=chunks)

    def _keep(self, chunk: int) -> None:
        if chunk in self._places:
            self._client.mapping.keep(self._places[chunk][0], self._chunks[chunk].chunk)


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
        self._asked: set[int] = set()
        self._needed = range(0)
        self._over: dict[int, int] = {}  # chunks that were needed, and for how many steps not
        self._cursor = 0
        self._looked = -1

    def parts(self, step: int) -> list[Part]:
        """Returns the pieces of chunks that make up this rank's share of a step."""
        start, stop = self._plan.positions(step)
        if start == stop:
            return []
        needed = self._chunks(start, stop)
        if self._over or needed != self._needed:  # else nothing changes
            self._needed = needed
            self._advance(needed, self._next_chunks(step, needed))
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

    def _next_chunks(self, step: int, needed: range) -> list[int]:
        """The chunks that later steps need first: asked for ahead of time."""
        found: list[int] = []
        last = needed[-1]
        if last == self._looked or any(chunk > last for chunk in self._asked):
            return found
        self._looked = last
        for later in range(step + 1, self._plan.num_steps):
            if len(found) >= self._opened.num_ahead:
                break
            start, stop = self._plan.positions(later)
            for chunk in self._chunks(start, stop):
                if chunk > last:
                    found.append(chunk)
                    last = chunk
        return found[: self._opened.num_ahead]

    def _advance(self, needed: range, ahead: list[int]) -> None:
        """Tells the agent what changed, if anything did."""
        missing = [chunk for chunk in needed if not self._has_arrived(chunk)]
        cursor = needed[0]
        released = self._let_go(cursor)
        if not missing and not ahead and not released and cursor == self._cursor:
            return
        self._asked.update(missing, ahead)
        self._cursor = cursor
        self._opened.advance(
            cursor,
            needed=missing,
            ahead=ahead,
            released=released,
            num_consumed=self._take_consumed(),
        )

    def _has_arrived(self, chunk: int) -> bool:
        if chunk in self._asked and not self._opened.has(chunk):
            self._client.hear()
        return chunk in self._asked and self._opened.has(chunk)

    def _let_go(self, cursor: int) -> list[int]:
        """Lets go of what is needed no more; of what the user has views of, later."""
        for chunk in [chunk for chunk in self._asked if chunk < cursor]:
            self._asked.discard(chunk)
            self._over[chunk] = 0
        released = self._opened.let_go(self._over, patient=True)
        for chunk in released:
            del self._over[chunk]
        late = [chunk for chunk, steps in self._over.items() if steps >= _PATIENCE]
        released += self._opened.let_go(late, patient=False)
        self._over = {c: steps + 1 for c, steps in self._over.items() if c not in late}
        return released
