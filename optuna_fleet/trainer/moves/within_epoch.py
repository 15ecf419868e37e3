"""Where a pass over an epoch may be left in its midst, and where it goes on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

from optuna_fleet.trainer.data.periods import Periods
from optuna_fleet.trainer.gradients.shares import BatchShares
from optuna_fleet.trainer.moves.stop_line import StopLine
from optuna_fleet.trainer.moves.totals import Totals
from optuna_fleet.trainer.unsaved.steps import Steps
from optuna_fleet.wire.messages import Place


class Hold(Protocol):
    """Keeps what a step begins with."""

    def __call__(self, place: Place, *, is_last: bool) -> object:
        """Called before the step."""


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


class WithinEpoch:
    """One rank's way through the batches of an epoch.

    Only the first pass of an epoch can be left. What came before another one would be done again,
    with other weights.

    Args:
        position: Kept up to date by whoever counts epochs.
        shares: Which passes are under way.
        totals: Begin at 0 with each epoch.
        steps: What is done with the batches.
        stop_line: Returns where to leave.
        leave: Leaves at a step of the epoch; returns if that can't be, or if another run goes on
            here: whether that is so.
        counts: Returns how many calls and collectives there were.
        resume: Puts back what the checkpoint has; returns what `first_step` does.

    Attributes:
        position: As it was given.
        totals: Likewise.
        at_step: Called with who asks for a batch, before a step of a pass that can be left.
        hold: Called with such a step, where it can be left: the trial may have to go back there.
        can_be_joined: Between the objective's beginning, or an epoch's, and the next step to stop
            at, nothing was done that all ranks must do.
        is_movable: This epoch could be, or could have been, left in its midst.
    """

    def __init__(
        self,
        position: EpochPosition,
        shares: BatchShares,
        totals: Totals,
        steps: Steps,
        stop_line: Callable[[], StopLine],
        *,
        counts: Callable[[], tuple[int, int]] = lambda: (0, 0),
        leave: Callable[[int], bool],
        resume: Callable[[], tuple[int, bool]],
    ) -> None:
        self.position = position
        self._shares = shares
        self.totals = totals
        self._steps = steps
        self._stop_line = stop_line
        self._leave = leave
        self._resume = resume
        self.at_step: Callable[[FrameType], object] = lambda frame: None
        self.hold: Hold = lambda place, *, is_last: None
        self.is_movable = False
        self.can_be_joined = True
        self._counts = counts
        self._begun_at: tuple[int, int] | None = None
        self._num_passes = 0
        self._num_gradients: int | None = None  # when a batch was handed out last
        self._reads_ahead = False

    def begin_epoch(self) -> None:
        """None of the epoch's batches was read."""
        _, num_collectives = counts = self._counts()
        is_first = self._begun_at is None
        self.can_be_joined &= self.position.loop == 1 and not (is_first and num_collectives)
        self._begun_at = counts
        self.is_movable = False
        self._num_passes = 0
        self.totals.begin()
        self._stop_line().come_to(self._place(0))

    def begin_pass(self, *, movable: bool) -> bool:
        """A pass begins; return whether it can be left in its midst."""
        self._num_passes += 1
        if self._num_passes == 1 and self.position.is_inside:
            self.can_be_joined &= self._counts() == self._begun_at
        self._num_gradients = None
        self.totals.void()
        can_leave = movable and self._num_passes == 1 and self.position.is_inside
        if not can_leave:
            self.end_pass()
        self.is_movable |= can_leave
        return can_leave

    def first_step(self, *, movable: bool) -> tuple[int, bool]:
        """The step to begin a pass with, and whether that goes on on as many devices."""
        return self._resume() if movable else (0, False)

    def come_to(self, step: int, number: int, *, is_last: bool) -> bool:
        """A step is about to begin, which the caller's caller's caller has asked for.

        Args:
            step: The step.
            number: Of the pass.
            is_last: It is the last one of the pass.

        Returns:
            Whether another run goes on here: the step is still to be read.
        """
        self.at_step(sys._getframe(3))  # not kept, with all that it refers to
        # A batch that was not trained on when the next one was asked for may be so later.
        self._reads_ahead |= self._num_gradients == self._steps.num_gradients
        self._num_gradients = self._steps.num_gradients
        if self._reads_ahead or not self._shares.reads_only(number):
            return False
        self.hold(self._place(step), is_last=is_last)
        following = self._place(step + 1)
        if self._stop_line().is_reached(self._place(step), following):
            line = self._stop_line()
            if self._leave(step):
                self._num_gradients = None
                self._stop_line().come_to(self._place(step))
                return True
            line.withdraw(following)
        return False

    def end_pass(self) -> None:
        """The epoch can't be left in its midst any more."""
        loop, epoch, _ = self._place(0)
        self._stop_line().come_to((loop, epoch + 1, 0))

    def _place(self, step: int) -> Place:
        return self.position.loop, self.position.epoch, step
