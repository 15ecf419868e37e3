"""Where a pass over an epoch may be left or saved in its midst, and where it goes on."""

from __future__ import annotations

from collections.abc import Callable

from optuna_fleet.trainer.moves.stop_line import StopLine
from optuna_fleet.trainer.parts import Parts
from optuna_fleet.wire.messages import Place, StopAt


class WithinEpoch:
    """One rank's way through the batches of an epoch.

    Only the first pass of an epoch can be left. What came before another one would be done again,
    with other weights.

    Args:
        parts: Of the training; its position is kept up to date by whoever counts epochs.
        at_step: Called before each step of a pass that can be left.
        save: Begins to write a checkpoint of where such a step begins.
        leave: Leaves at a step of the epoch, as ordered; returns if that can't be, or if another
            run goes on here: whether that is so.
        resume: Puts back what the checkpoint has; returns what `first_step` does.

    Attributes:
        can_be_joined: Between the objective's beginning, or an epoch's, and the next step to stop
            at, nothing was done that all ranks must do.
        is_movable: This epoch could be, or could have been, left in its midst.
    """

    def __init__(
        self,
        parts: Parts,
        *,
        at_step: Callable[[], object],
        save: Callable[[int], object],
        leave: Callable[[int, StopAt], bool],
        resume: Callable[[], tuple[int, bool]],
    ) -> None:
        self._parts = parts
        self._position = parts.position
        self._save = save
        self._leave = leave
        self._resume = resume
        self._at_step = at_step
        self.is_movable = False
        self.can_be_joined = True
        self._begun_at: tuple[int, int] | None = None
        self._num_passes = 0
        self._num_backward: int | None = None  # passes, when a batch was handed out last
        self._reads_ahead = False

    @property
    def _stop_line(self) -> StopLine:
        return self._parts.session.stop_line

    def _counts(self) -> tuple[int, int]:
        """How many calls and collectives there were."""
        progress = self._parts.session.progress
        return progress.num_calls, progress.num_collectives

    def begin_epoch(self) -> None:
        """None of the epoch's batches was read."""
        _, num_collectives = counts = self._counts()
        is_first = self._begun_at is None
        self.can_be_joined &= self._position.loop == 1 and not (is_first and num_collectives)
        self._begun_at = counts
        self.is_movable = False
        self._num_passes = 0
        self._parts.totals.begin()
        self._stop_line.come_to(self._place(0))

    def begin_pass(self, *, movable: bool) -> bool:
        """A pass begins; return whether it can be left in its midst."""
        self._num_passes += 1
        if self._num_passes == 1 and self._position.is_inside:
            self.can_be_joined &= self._counts() == self._begun_at
        self._num_backward = None
        self._parts.totals.void()
        can_leave = movable and self._num_passes == 1 and self._position.is_inside
        if not can_leave:
            self.end_pass()
        self.is_movable |= can_leave
        return can_leave

    def first_step(self, *, movable: bool) -> tuple[int, bool]:
        """The step to begin a pass with, and whether that goes on on as many devices."""
        return self._resume() if movable else (0, False)

    def come_to(self, step: int, number: int) -> bool:
        """A step is about to begin.

        Returns:
            Whether another run goes on here: the step is still to be read.
        """
        self._at_step()
        # A batch that was not trained on when the next one was asked for may be so later.
        self._reads_ahead |= self._num_backward == self._parts.reducer.num_passes
        self._num_backward = self._parts.reducer.num_passes
        if self._reads_ahead or not self._parts.weights.reads_only(number):
            return False
        order = self._stop_line.take(self._place(step), self._place(step + 1))
        if order is None:
            return False
        if order.saves:
            self._save(step)
            return False
        if not self._leave(step, order):
            return False
        self._num_backward = None
        self._stop_line.come_to(self._place(step))
        return True

    def end_pass(self) -> None:
        """The epoch can't be left in its midst any more."""
        loop, epoch, _ = self._place(0)
        self._stop_line.come_to((loop, epoch + 1, 0))

    def _place(self, step: int) -> Place:
        return self._position.loop, self._position.epoch, step
