"""Periods of so many steps each: they go on where the one before has ended, over epochs' ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from optuna_fleet.arguments import check_number


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
        self, read: Callable[..., Any], period: int, first_step: int, *, head: int | None
    ) -> PeriodBatches:
        """The batches of a period.

        Args:
            read: Returns the batches of an epoch, given `epoch`, `first_step` and `continues`.
            period: Which, from 0.
            first_step: The period's batches to skip.
            head: The epoch to begin with, for a data set that rolls: then a period begins where
                other trials are. None for one that goes on where the period before has ended.
        """
        begin = period * self.every
        steps = range(begin, min(begin + self.every, self.num_steps))
        shift = 0 if head is None else begin
        return PeriodBatches(
            read,
            range(steps.start - shift + first_step, steps.stop - shift),
            num_steps=self.num_steps - shift,
            first_epoch=head or 0,
        )


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
