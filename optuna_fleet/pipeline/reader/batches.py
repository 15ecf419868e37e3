"""One pass over one epoch: which samples make each step, and the chunks they come from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optuna_fleet.pipeline.chunks.chunk_view import Part, cut_batch
from optuna_fleet.pipeline.reader.read_plan import ReadPlan

if TYPE_CHECKING:
    from optuna_fleet.pipeline.reader.client import PipelineClient

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
        self._waited_s = client.waited_s
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
        waited_s = self._client.waited_s - self._waited_s
        self._opened.close(num_consumed=self._take_consumed(), waited_s=waited_s)

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
