"""Which samples make each step of a pass, and whether that can be asked for."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

from optuna_fleet.arguments import check_number, check_that, is_a
from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.pipeline.spec import PipelineSpec


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


def _at_least(minimum: int, **argument: Any) -> int:
    ((name, value),) = argument.items()
    check_number(name, value, least=minimum, whole=True)
    return operator.index(value)
