"""What all that reads, trains or watches has in common in a run.

What it reads and where it is in that, epochs or periods of steps cut out of these; and on how many
devices it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from optuna_fleet.alloc.problem import Facts
from optuna_fleet.arguments import check_number
from optuna_fleet.events import WidthLimited
from optuna_fleet.exceptions import FleetConfigError, TrialError
from optuna_fleet.trainer.gradients.reducer import Reducer
from optuna_fleet.trainer.gradients.weights import Weights
from optuna_fleet.trainer.session import Session
from optuna_fleet.trainer.totals import Totals
from optuna_fleet.wire.messages import Remark, RunTrial


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


@dataclass(frozen=True, slots=True)
class Bounds(Facts):
    """Fewest and most devices that the objective wants; None for as many as it can use.

    They are of one type, unless it `spans_types`. And what else it says of itself.
    """

    min_devices: int = 1
    max_devices: int | None = None
    spans_types: bool = False

    def most_for(self, num_samples: int) -> int:
        """Most devices that a batch of so many can use, or as few as are asked for.

        A rank without a sample computes a stand-in.
        """
        most = max(num_samples, self.min_devices)
        return min(most, self.max_devices or most)

    @classmethod
    def checked(
        cls,
        min_devices: int | None = None,
        max_devices: int | None = None,
        *,
        run: RunTrial,
        spans_types: bool = False,
        **facts: Any,
    ) -> Bounds:
        """What was given to `FleetTrial.prepare` or `FleetTrial.pipeline`; None for no bound.

        Raises:
            FleetConfigError: They contradict each other, or the fleet, of which `run` tells.
        """
        check_number("min_devices", min_devices, least=1, whole=True, optional=True)
        check_number("max_devices", max_devices, least=1, whole=True, optional=True)
        least = min_devices or 1
        fleet = ("the fleet has", run.num_of_all_types)
        if not spans_types:
            fleet = (f"{'' if run.are_alike else 'of one type '}the fleet has", run.num_devices)
        for what, most in (("`max_devices` is", max_devices), fleet):
            if most is not None and least > most:
                raise FleetConfigError(
                    f"`min_devices` is {least}, but {what} {most}: it must not be more."
                )
        return cls(least, max_devices, spans_types, **facts)


class Widths:
    """On how many devices the trial of a session trains, and why on no more."""

    def __init__(self, session: Session) -> None:
        self.bounds = Bounds()  # what the objective has asked for
        self._session = session

    def too_wide(self, why: str, max_devices: int = 1) -> TrialError:
        """A step can't be done on more devices than that: tell so; return what is to be raised.

        The run ends, and the trial goes on, unless it must not have so few.
        """
        devices = "one device" if max_devices == 1 else f"{max_devices} devices at most"
        if max_devices < (least := self.bounds.min_devices):
            return TrialError(
                f"{why} It could go on on {devices}, but its `min_devices` is {least}."
            )
        run = self._session.run
        self._session.send(WidthLimited(run_id=run.run_id, max_devices=max_devices))
        remark = Remark(
            run_id=run.run_id,
            keys=(f"trial {run.number} is too wide",),  # once, wherever it is found again
            text=f"{why} The trial goes on from its last checkpoint, on {devices}.",
        )
        self._session.send(remark)  # whichever rank finds it
        return TrialError(why)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Of one rank's training."""

    session: Session
    device: torch.device
    position: EpochPosition
    widths: Widths
    weights: Weights
    reducer: Reducer
    totals: Totals  # sums over the epoch

    @property
    def run(self) -> RunTrial:
        """The run under way."""
        return self.session.run
