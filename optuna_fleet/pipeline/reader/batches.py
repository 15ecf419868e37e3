"""One pass over one epoch: which samples make each step, and the chunks they come from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.pipeline.chunks.view import Part, cut_alike
from optuna_fleet.pipeline.messages import Advance, ClosePass

if TYPE_CHECKING:
    from optuna_fleet.pipeline.reader.client import PipelineClient


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One rank's share of one global batch.

    Attributes:
        data: What a DataLoader would have given for these samples. None if the share is empty (or
            a dummy of one sample, where that was asked for).
        local_size: Samples in this rank's share.
        global_size: Samples in the whole batch, over all ranks.
        is_finished: There is nothing left to do of the preprocessing.
    """

    data: Any
    local_size: int
    global_size: int
    is_finished: bool = False


def shard(size: int, rank: int, world_size: int) -> tuple[int, int]:
    """Returns the range of a batch of ``size`` samples that belongs to ``rank``.

    Contiguous; the first ``size % world_size`` ranks get one more than the others.
    """
    share, extra = divmod(size, world_size)
    start = rank * share + min(rank, extra)
    return start, start + share + (rank < extra)


class Span(NamedTuple):
    """The part of a pass that lies in one epoch of a data set: its samples [first, last).

    Sample ``i`` of the pass is sample ``i + shift`` of that epoch.
    """

    epoch: int
    first: int
    last: int
    shift: int

    def positions(self, start: int, stop: int) -> tuple[int, int]:
        """Returns which samples of the epoch are among samples [start, stop) of the pass."""
        return max(start + self.shift, self.first), min(stop + self.shift, self.last)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan:
    """The arguments of ``PipelineClient.read``, and what follows from them."""

    name: str
    epoch: int
    num_samples: int
    batch_size: int
    rank: int
    world_size: int
    drop_last: bool
    dummy: bool
    continues: bool
    first_step: int
    origin: int | None

    @property
    def spans(self) -> tuple[Span, ...]:
        """The epochs that the pass reads: one, or the end of one and the beginning of the next."""
        origin, length = self.origin or 0, self.num_samples
        tail = Span(self.epoch, origin, length, origin)
        return (tail, Span(self.epoch + 1, 0, origin, origin - length)) if origin else (tail,)

    @property
    def num_steps(self) -> int:
        """Batches of the whole epoch."""
        full, rest = divmod(self.num_samples, self.batch_size)
        return full + bool(rest and not self.drop_last)

    def check(self) -> None:
        """Raises FleetConfigError where the arguments do not go together."""
        if self.rank >= self.world_size:
            raise FleetConfigError(
                f"The value of `rank` is {self.rank}, but `world_size` is {self.world_size}."
            )
        if not self.num_steps:
            raise FleetConfigError(
                f"With drop_last=True and batch_size={self.batch_size}, data set {self.name!r} of "
                f"{self.num_samples} samples gives no batch at all. Use a batch size of at most "
                f"{self.num_samples}, or drop_last=False."
            )

    def size(self, step: int) -> int:
        """Samples of the global batch of a step."""
        return min(self.batch_size, self.num_samples - step * self.batch_size)

    def positions(self, step: int) -> tuple[int, int]:
        """Range of the canonical order to read for a step; a dummy is one sample."""
        begin = step * self.batch_size
        start, stop = shard(self.size(step), self.rank, self.world_size)
        if start == stop and self.dummy:
            return begin, begin + 1
        return begin + start, begin + stop

    def local_size(self, step: int) -> int:
        """Samples of this rank's share of a step."""
        start, stop = shard(self.size(step), self.rank, self.world_size)
        return stop - start


class Batches:
    """The batches of one epoch, in canonical order; iterable any number of times.

    ``len()`` is the number of steps. Leaving the loop early gives back everything.
    """

    def __init__(self, client: PipelineClient, plan: ReadPlan) -> None:
        self._client = client
        self._plan = plan

    def __len__(self) -> int:
        return max(0, self._plan.num_steps - self._plan.first_step)

    @property
    def last_size(self) -> int:
        """Samples of the last of them."""
        return self._plan.size(self._plan.num_steps - 1)

    def __iter__(self) -> Iterator[Batch]:
        plan = self._plan
        if not len(self):
            return
        collate = self._client.collate_fn(plan.name)
        finish = self._client.finisher(plan.name)
        if plan.origin is None:
            epoch, origin = self._client.head(plan.name)
            plan = replace(plan, epoch=epoch, origin=origin)
        reading = _Reading(self._client, plan)
        try:
            for step in range(plan.first_step, plan.num_steps):
                parts = reading.parts(step)
                data, is_finished = cut_alike(parts, collate, finish) if parts else (None, True)
                del parts  # or they would outlive their release, for as long as the user computes
                local_size = plan.local_size(step)
                reading.consumed += local_size
                yield Batch(
                    data=data,
                    local_size=local_size,
                    global_size=plan.size(step),
                    is_finished=is_finished,
                )
        finally:
            reading.close()


class _Reading:
    """A pass from its first step to its last, through one epoch or two.

    Attributes:
        consumed: Samples that were read and not yet reported.
    """

    def __init__(self, client: PipelineClient, plan: ReadPlan) -> None:
        self._client = client
        self._plan = plan
        self._spans = list(plan.spans)
        self._pass: _Pass | None = None
        self.consumed = 0

    def parts(self, step: int) -> list[Part]:
        """Returns the pieces of chunks that make up this rank's share of a step."""
        parts: list[Part] = []
        _, stop = asked = self._plan.positions(step)
        while True:
            first, last = self._spans[0].positions(*asked)
            if first < last:
                self._pass = self._pass or self._begin(step)
                parts += self._pass.parts(step)
            if len(self._spans) == 1 or stop + self._spans[0].shift <= self._spans[0].last:
                return parts
            self.close()
            del self._spans[0]

    def _begin(self, step: int) -> _Pass:
        continues = self._plan.continues or len(self._spans) > 1
        return _Pass(self._client, self._plan, self._spans[0], step, continues=continues)

    def close(self) -> None:
        """Ends what is open and reports it."""
        if self._pass is not None:
            self._pass.close(self.consumed)
            self._pass, self.consumed = None, 0


class _Pass:
    """A pass over one epoch, as the agent sees it.

    Keeps the chunks of the current step, asks for those of the next, gives back the rest.
    """

    def __init__(
        self, client: PipelineClient, plan: ReadPlan, span: Span, step: int, *, continues: bool
    ) -> None:
        self._client = client
        self._plan = plan
        self._span = span
        self._waited_s = client.waited_s
        start, _ = span.positions(step * plan.batch_size, plan.num_samples)
        self._number, self._chunk_size = client.open_pass(
            plan.name, span.epoch, start, continues=continues
        )
        self._asked: set[int] = set()
        self._cursor = 0
        self._last = -1
        self._read_to = 0

    def parts(self, step: int) -> list[Part]:
        """Returns the pieces of chunks that make up this rank's share of a step."""
        start, stop = self._span.positions(*self._plan.positions(step))
        self._read_to = stop
        needed = self._chunks(start, stop)
        ahead = range(0)
        if needed and needed[-1] != self._last:
            self._last = needed[-1]
            ahead = self._next_chunks(step, self._last)
        self._advance(needed, ahead)
        size = self._chunk_size
        return [
            (
                self._client.take(self._number, chunk),
                max(start - chunk * size, 0),
                min(stop - chunk * size, size),
            )
            for chunk in needed
        ]

    def close(self, num_consumed: int) -> None:
        """Ends the pass and reports it."""
        self._client.close_pass(
            ClosePass(
                pass_id=self._number,
                num_consumed=num_consumed,
                waited_s=self._client.waited_s - self._waited_s,
                end=-(-self._read_to // self._chunk_size),
            )
        )

    def _chunks(self, start: int, stop: int) -> range:
        size = self._chunk_size
        return range(start // size, -(-stop // size)) if stop > start else range(0)

    def _next_chunks(self, step: int, last: int) -> range:
        """The first chunk after ``last`` that a later step needs: asked for ahead of time."""
        for later in range(step + 1, self._plan.num_steps):
            start, stop = self._span.positions(*self._plan.positions(later))
            if start >= self._span.last:
                break
            chunks = self._chunks(start, stop)
            if chunks and chunks[-1] > last:
                first = max(chunks[0], last + 1)
                return range(first, first + 1)
        return range(0)

    def _advance(self, needed: range, ahead: range) -> None:
        """Tells the agent what changed, if anything did."""
        missing = [
            chunk
            for chunk in needed
            if chunk not in self._asked or not self._client.arrived(self._number, chunk)
        ]
        early = [chunk for chunk in ahead if chunk not in self._asked]
        cursor = needed[0] if needed else self._cursor
        released = [chunk for chunk in self._asked if chunk < cursor]
        if not missing and not early and not released:
            return
        self._asked.difference_update(released)
        self._asked.update(missing, early)
        self._cursor = cursor
        self._client.advance(
            Advance(
                pass_id=self._number,
                cursor=cursor,
                needed=tuple(missing),
                ahead=tuple(early),
                released=tuple(released),
            )
        )
