"""Where a pass over an epoch may be left or saved in its midst, and where it goes on."""

from __future__ import annotations

from optuna_fleet.trainer.moves.leaving import Leaving
from optuna_fleet.trainer.run_parts import Parts
from optuna_fleet.trainer.training_state import TrainingState
from optuna_fleet.wire.messages import Place


class WithinEpoch:
    """One rank's way through the batches of an epoch.

    Only the first pass of an epoch can be left. What came before another one would be done again,
    with other weights.

    Args:
        parts: Of the training; its position is kept up to date by whoever counts epochs.
        state: Tells where the trial goes on.
        leaving: Saves and leaves it.

    Attributes:
        is_movable: This epoch could be, or could have been, left in its midst.
    """

    def __init__(self, parts: Parts, state: TrainingState, leaving: Leaving) -> None:
        self._parts = parts
        self._position = parts.position
        self._stop_line = parts.session.stop_line
        self._state = state
        self._leaving = leaving
        self.is_movable = False
        self._num_passes = 0
        self._num_backward: int | None = None  # passes, when a batch was handed out last
        self._reads_ahead = False

    def begin_epoch(self) -> None:
        """None of the epoch's batches was read."""
        self.is_movable = False
        self._num_passes = 0
        self._parts.totals.begin()
        self._stop_line.come_to(self._place(0))

    def begin_pass(self, *, movable: bool) -> bool:
        """A pass begins; return whether it can be left in its midst."""
        self._num_passes += 1
        self._num_backward = None
        self._parts.totals.void()
        can_leave = movable and self._num_passes == 1 and self._position.is_inside
        if not can_leave:
            self.end_pass()
        self.is_movable |= can_leave
        return can_leave

    def first_step(self, *, movable: bool) -> tuple[int, bool]:
        """The step to begin with, and whether a pass goes on there on as many devices."""
        return self._state.first_step() if movable else (0, False)

    def come_to(self, step: int, number: int) -> None:
        """A step of the pass of this number is about to begin."""
        # A batch that was not trained on when the next one was asked for may be so later.
        self._reads_ahead |= self._num_backward == self._parts.reducer.num_passes
        self._num_backward = self._parts.reducer.num_passes
        if self._reads_ahead or not self._parts.weights.reads_only(number):
            return
        order = self._stop_line.take(self._place(step), self._place(step + 1))
        if order is None:
            return
        if order.saves:
            self._leaving.save(step)
        else:
            self._leaving.leave(step, stays=order.stays)

    def end_pass(self) -> None:
        """The epoch can't be left in its midst any more."""
        loop, epoch, _ = self._place(0)
        self._stop_line.come_to((loop, epoch + 1, 0))

    def _place(self, step: int) -> Place:
        return self._position.loop, self._position.epoch, step
