"""Where an objective is in its epochs, or in periods of steps, which go on over their ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from optuna_fleet.arguments import check_number


@dataclass(frozen=True, slots=True)
class Start:
    """Where a data set begins to be read: a sample of an epoch, at a step of the loop."""

    epoch: int = 0
    origin: int = 0
    step: int = 0


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

    def batches(
        self, read: Callable[..., Any], period: int, first_step: int, start: Start
    ) -> PeriodBatches:
        """The batches of a period, which go on where those of the period before have ended.

        Args:
            read: Returns the batches of an epoch, given `epoch`, `first_step` and `continues`.
            period: Which, from 0.
            first_step: The period's batches to skip.
            start: Where the data set has begun to be read.
        """
        begin = period * self.every - start.step
        num_steps = self.num_steps - start.step
        steps = range(begin + first_step, min(begin + self.every, num_steps))
        return PeriodBatches(read, steps, num_steps=num_steps, first_epoch=start.epoch)


class PeriodBatches:
    """Some steps of a data set whose epochs follow one another; like `Batches` of one epoch."""

    def __init__(
        self, read: Callable[..., Any], steps: range, *, num_steps: int, first_epoch: int
    ) -> None:
        self._read = read
        self._steps = steps
        self._num_steps = num_steps
        self._first_epoch = first_epoch
        self._epoch = read(epoch=first_epoch)

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
                epoch=self._first_epoch + epoch,
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
    def counting(self, periods: Periods | None) -> Iterator[None]:
        """These are the `periods` until the loop ends, be it that the objective leaves it."""
        self.periods = periods
        try:
            yield
        finally:
            if self.periods is periods:  # no other loop has begun
                self.periods = None
