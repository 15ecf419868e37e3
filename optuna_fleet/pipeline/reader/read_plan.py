"""Which samples make each step of a pass, and whether that can be asked for."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from optuna_fleet.arguments import check_number, check_that, is_a
from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.pipeline.spec import PipelineSpec

_Batch = TypeVar("_Batch")


def shard(size: int, rank: int, world_size: int) -> tuple[int, int]:
    """Returns the range of a batch of ``size`` samples that belongs to ``rank``.

    Contiguous; the first ``size % world_size`` ranks get one more than the others.
    """
    share, extra = divmod(size, world_size)
    start = rank * share + min(rank, extra)
    return start, start + share + (rank < extra)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan:
    """How to read one epoch of a data set in batches, or one rank's shard of each of them.

    Attributes:
        name: The data set.
        num_samples: Samples of an epoch of it.
        epoch: From 0. A fixed data set is the same in all of them.
        batch_size: Samples per global batch, over all ranks.
        rank: Whose shard to read. The first ``size % world_size`` ranks get one sample more.
        world_size: Number of ranks that share each batch.
        drop_last: Leave out the last batch if it is smaller than the others.
        dummy: Where the shard is empty, give the batch's first sample as data instead of None;
            ``local_size`` is 0 all the same.
        first_step: Batches to skip, for a trial that resumes within an epoch.
        continues: The next epoch will be read too: its beginning is preprocessed in good time.
    """

    name: str
    num_samples: int
    epoch: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    drop_last: bool = False
    dummy: bool = False
    first_step: int = 0
    continues: bool = False

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


class Batches(Generic[_Batch]):
    """The batches of one epoch, in canonical order; iterable any number of times.

    ``len()`` is the number of steps. Leaving the loop early gives back everything. ``read`` yields
    the batches of a plan.
    """

    def __init__(self, plan: ReadPlan, read: Callable[[ReadPlan], Iterator[_Batch]]) -> None:
        self.plan = plan
        self._read = read

    def __len__(self) -> int:
        return max(0, self.plan.num_steps - self.plan.first_step)

    def __iter__(self) -> Iterator[_Batch]:
        return self._read(self.plan)


_LEAST = {"epoch": 0, "batch_size": 1, "rank": 0, "world_size": 1, "first_step": 0}


def planned(spec: PipelineSpec, name: str, **arguments: Any) -> ReadPlan:
    """Returns how to read a data set; the arguments are the attributes of `ReadPlan`."""
    dataset = spec.dataset(name)
    plan = ReadPlan(name=name, num_samples=dataset.num_samples, **arguments)
    check_that("drop_last", plan.drop_last, is_a(bool), "be True or False")
    numbers: dict[str, Any] = {each: getattr(plan, each) for each in _LEAST}
    for each, number in numbers.items():
        check_number(each, number, least=_LEAST[each], whole=True)
        numbers[each] = operator.index(number)
    plan = replace(plan, **numbers, continues=plan.continues and dataset.shuffled)
    plan.check()
    return replace(plan, epoch=dataset.canonical_epoch(plan.epoch))
