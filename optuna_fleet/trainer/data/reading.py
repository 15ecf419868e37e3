"""What a trial reads of the shared data sets: epochs, or periods of steps cut out of these."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from optuna_fleet.arguments import check_number
from optuna_fleet.pipeline.reader.client import PipelineClient
from optuna_fleet.pipeline.reader.inline_client import InlineClient

if TYPE_CHECKING:
    from optuna_fleet.trainer.data.shard_loader import ShardLoader


@dataclass(frozen=True, slots=True)
class Asked:
    """Batches of that size over all ranks; `drop_last` leaves out a smaller last one."""

    name: str
    batch_size: int
    drop_last: bool


@dataclass(frozen=True, slots=True)
class Periods:
    """A trial's steps, cut into periods.

    Attributes:
        num_steps: Of all of them.
        every: Of each but the last, which may have fewer.
    """

    num_steps: int
    every: int

    @classmethod
    def checked(cls, num_steps: int, every: int) -> Periods:
        """Checks what the user gave."""
        check_number("num_steps", num_steps, least=1, whole=True)
        check_number("every", every, least=1, whole=True)
        return cls(int(num_steps), int(min(every, num_steps)))

    def __len__(self) -> int:
        return -(-self.num_steps // self.every)

    def batches(self, read: Callable[..., Any], period: int, first_step: int) -> PeriodBatches:
        """The batches of a period, which go on where those of the period before have ended.

        Args:
            read: Returns the batches of an epoch, given `epoch`, `first_step` and `continues`.
            period: Which, from 0.
            first_step: The period's batches to skip.
        """
        begin = period * self.every
        steps = range(begin + first_step, min(begin + self.every, self.num_steps))
        return PeriodBatches(read, steps, num_steps=self.num_steps)


class PeriodBatches:
    """Some steps of a data set whose epochs follow one another; like `Batches` of one epoch."""

    def __init__(self, read: Callable[..., Any], steps: range, *, num_steps: int) -> None:
        self._read = read
        self._steps = steps
        self._num_steps = num_steps
        self._epoch = read(epoch=0)

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def last_size(self) -> int:
        """Samples of the last batch of an epoch."""
        return self._epoch.last_size  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[Any]:
        per_epoch = len(self._epoch)
        steps = self._steps
        while steps:
            epoch, first = divmod(steps[0], per_epoch)
            num_read = min(len(steps), per_epoch - first)
            batches = self._read(
                epoch=epoch,
                first_step=first,
                continues=(epoch + 1) * per_epoch < self._num_steps,
            )
            yield from islice(batches, num_read)
            steps = steps[num_read:]


@dataclass(slots=True)
class EpochPosition:
    """Where the objective is in its epochs, or in periods of its own (`FleetTrial.steps`).

    Attributes:
        loop: How many loops over `FleetTrial.epochs` there were, with that under way.
        epoch: The one under way, from 0.
        num_epochs: How many there will be.
        periods: What these are, where they are no epochs of the data.
        is_inside: Whether it is in a loop over `FleetTrial.epochs`.
        reads_unprepared: Whether it has read batches before it had prepared a model.
    """

    loop: int = 0
    epoch: int = 0
    num_epochs: int = 1
    periods: Periods | None = None
    is_inside: bool = False
    reads_unprepared: bool = False

    @contextmanager
    def counting(self, num_epochs: int, periods: Periods | None) -> Iterator[None]:
        """There are so many epochs, or `periods`, until the loop ends, or is left."""
        self.is_inside, self.num_epochs, self.periods = True, num_epochs, periods
        try:
            yield
        finally:
            if self.periods is periods:  # no other loop has begun
                self.periods = None


class Reading:
    """Finds the batches of a pass."""

    def __init__(self, pipeline: PipelineClient | InlineClient, position: EpochPosition) -> None:
        self._pipeline = pipeline
        self._position = position

    def batches(self, asked: Asked, place: tuple[int, int], first_step: int = 0) -> Any:
        """The batches of a pass.

        Args:
            asked: For what.
            place: This rank among those that share a batch, and their number.
            first_step: Batches to skip.
        """
        rank, world_size = place
        read = partial(
            self._pipeline.read,
            asked.name,
            batch_size=asked.batch_size,
            drop_last=asked.drop_last,
            rank=rank,
            world_size=world_size,
            dummy=True,
        )
        position, periods = self._position, self._position.periods
        if periods is not None and self._pipeline.spec.dataset(asked.name).shuffled:
            return periods.batches(read, position.epoch, first_step)
        goes_on = position.epoch + 1 < position.num_epochs
        return read(epoch=position.epoch, first_step=first_step, continues=goes_on)


class Shards:
    """One epoch's batches, this rank's share of each: what `FleetTrial.batches` returns."""

    def __init__(self, loader: ShardLoader, asked: Asked, *, movable: bool) -> None:
        self._loader = loader
        self._asked = asked
        self._movable = movable

    @property
    def most_samples(self) -> int:
        """Of a batch, over all ranks."""
        return min(self._asked.batch_size, self._loader.num_samples(self._asked.name))

    def __len__(self) -> int:
        """Number of steps in the epoch, the same on every rank."""
        return self._loader.num_steps(self._asked)

    def __iter__(self) -> Iterator[Any]:
        return self._loader.read(self._asked, movable=self._movable)
