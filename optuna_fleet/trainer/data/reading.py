"""What a trial reads of the shared data sets: epochs, or periods of steps cut out of these."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from optuna_fleet.arguments import check_number


@dataclass(frozen=True, slots=True)
class Asked:
    """Batches of that size over all ranks; `drop_last` leaves out a smaller last one."""

    name: str
    batch_size: int
    drop_last: bool


@dataclass(frozen=True, slots=True)
class Periods:
    """A trial's steps, cut into periods of `every`; the last may have fewer."""

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
        """The batches of a period but its first ones, after those of the period before.

        `read` returns the batches of an epoch, given `epoch`, `first_step` and `continues`.
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
        self._per_epoch = len(read(epoch=0))

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Any]:
        steps = self._steps
        while steps:
            epoch, first = divmod(steps[0], self._per_epoch)
            num_read = min(len(steps), self._per_epoch - first)
            continues = (epoch + 1) * self._per_epoch < self._num_steps
            batches = self._read(epoch=epoch, first_step=first, continues=continues)
            yield from islice(batches, num_read)
            steps = steps[num_read:]


@dataclass(slots=True)
class EpochPosition:
    """Where the objective is in its epochs, or in periods of its own (`FleetTrial.steps`).

    Attributes:
        loop: How many loops over `FleetTrial.epochs` there were, with that under way.
        periods: What its epochs are, where they are none of the data.
    """

    loop: int = 0
    epoch: int = 0  # the one under way
    num_epochs: int = 1
    periods: Periods | None = None
    is_inside: bool = False  # of such a loop
    reads_unprepared: bool = False  # it has read batches before it had prepared a model

    @contextmanager
    def counting(self, num_epochs: int, periods: Periods | None) -> Iterator[None]:
        """There are so many epochs, or `periods`, until the loop ends, or is left."""
        self.is_inside, self.num_epochs, self.periods = True, num_epochs, periods
        try:
            yield
        finally:
            if self.periods is periods:  # no other loop has begun
                self.periods = None
