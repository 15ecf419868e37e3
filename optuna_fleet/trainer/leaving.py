"""Where a run is saved, where it leaves its devices, and what it leaves behind in the end."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from optuna_fleet.events import MoveRefused
from optuna_fleet.trainer.checkpoint import Captured
from optuna_fleet.trainer.gradients.collectives import of_first_rank
from optuna_fleet.trainer.run_parts import Parts
from optuna_fleet.trainer.saving import Saver
from optuna_fleet.trainer.session import Yielded
from optuna_fleet.trainer.training_state import TrainingState
from optuna_fleet.wire import messages
from optuna_fleet.wire.calls import IsAmongBest
from optuna_fleet.wire.messages import Place
from optuna_fleet.wire.packing import pack, plain


@dataclass(frozen=True, slots=True)
class Held:
    """What a run leaves in its process' memory: what the trial goes on with."""

    content: Captured
    saver: Saver  # which writes it, and has what led to the best report


class Leaving:
    """Of one rank: all call it alike.

    Within an epoch only its first pass can be left. What came before another one would be done
    again, with other weights.

    Attributes:
        held: What the trial goes on with, once it has left; on rank 0.
        is_movable: This epoch could be, or could have been, left in its midst.
    """

    def __init__(self, parts: Parts, state: TrainingState, saver: Saver) -> None:
        self.held: Held | None = None
        self.is_movable = False
        self._parts = parts
        self._session = parts.session
        self._run = parts.run
        self._position = parts.position
        self._state = state
        self._saver = saver
        self._num_passes = 0
        self._num_backward: int | None = None  # passes, when a batch was handed out last
        self._reads_ahead = False

    # -- within an epoch --------------------------------------------------------------------------

    def begin_epoch(self) -> None:
        """None of the epoch's batches was read."""
        self.is_movable = False
        self._num_passes = 0
        self._parts.totals.begin()
        self._session.stop_line.come_to(self._place(0))

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

    def come_to(self, step: int, number: int) -> None:
        """A step of the pass of this number is about to begin."""
        # A batch that was not trained on when the next one was asked for may be so later.
        self._reads_ahead |= self._num_backward == self._parts.reducer.num_passes
        self._num_backward = self._parts.reducer.num_passes
        if self._reads_ahead or not self._parts.weights.reads_only(number):
            return
        order = self._session.stop_line.take(self._place(step), self._place(step + 1))
        if order is not None and order.saves:
            self.save(step)
        elif order is not None:
            self.leave(step, stays=order.stays)

    def end_pass(self) -> None:
        """The epoch can't be left in its midst any more."""
        loop, epoch, _ = self._place(0)
        self._session.stop_line.come_to((loop, epoch + 1, 0))

    def _place(self, step: int) -> Place:
        return self._position.loop, self._position.epoch, step

    # -- there, or at an epoch's end --------------------------------------------------------------

    def save(self, step: int | None = None) -> None:
        """Begin to write a checkpoint, if it has what is trained and none is being written."""
        if not self._state.is_empty and (found := self._captured(step)) is not None:
            self._saver.save(found)

    def leave(self, step: int | None = None, *, stays: bool) -> None:
        """Leave the objective, before a step of the first pass or at the epoch's end.

        Return if that can't be. Where the trial `stays` it goes on with what rank 0's process has
        in memory; else that is written before.

        Raises:
            Yielded: It has left, even if the objective catches everything.
        """
        self._saver.finish()
        if self._run.rank == 0:  # what is told of a checkpoint after this is of what it leaves
            self._session.send(messages.Leaving(run_id=self._run.run_id))
        found = None if self._state.is_empty else self._captured(step)
        if found is not None:
            self._saver.save(found)
        is_fit = found is not None and (stays or self._saver.finish())
        (is_fit,) = map(bool, of_first_rank([is_fit]))
        if is_fit:
            self.held = Held(found, self._saver) if found else None
            self._session.unwind(Yielded)
        if self._run.rank == 0:
            self._session.send(MoveRefused(run_id=self._run.run_id))

    def _captured(self, step: int | None) -> Captured | None:
        ranks = self._state.meet(step)
        with self._state.gathered():
            if self._run.rank > 0 or self._saver.is_busy:
                return None
            return self._saver.captured(partial(self._state.capture, step, ranks))

    # -- what is left in the end ------------------------------------------------------------------

    def keep_best(self) -> None:
        """Keep what led to the report just made, the best so far, if that may be left."""
        if not self._run.leaves_final or not self._state.objects:
            return
        with self._state.gathered():
            if self._run.rank == 0:
                self._saver.keep_best(self._state.weights)

    def leave_final(self, value: Any) -> None:
        """The objective returned `value`: leave its weights behind, if they are among the best."""
        if not self._run.leaves_final or not self._state.objects:
            return
        is_wanted = self._run.rank == 0 and self._is_wanted(value)
        if self._state.in_parts is not None:
            (is_wanted,) = map(bool, of_first_rank([is_wanted]))
        if not is_wanted:
            return
        with self._state.gathered():
            if self._run.rank == 0:
                self._saver.leave(plain(value), self._state.weights)

    def _is_wanted(self, value: Any) -> bool:
        try:
            return bool(self._session.ask(IsAmongBest, value=pack(plain(value))))
        except Exception:  # it can't be sent, say; the study will be told and say so
            return False
