"""Where a run is saved, where it leaves its devices, and what it leaves behind in the end."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from optuna_fleet.events import MoveRefused
from optuna_fleet.trainer.checkpoints.checkpoint import Captured
from optuna_fleet.trainer.checkpoints.saving import Saver
from optuna_fleet.trainer.gradients.collectives import of_first_rank
from optuna_fleet.trainer.session import Session, Yielded
from optuna_fleet.trainer.training_state import TrainingState
from optuna_fleet.wire import messages
from optuna_fleet.wire.calls import IsAmongBest
from optuna_fleet.wire.packing import pack, plain


@dataclass(frozen=True, slots=True)
class Held:
    """What a run leaves in its process' memory.

    Attributes:
        content: What the trial goes on with.
        saver: Which writes it, and has what led to the best report.
    """

    content: Captured
    saver: Saver


class Leaving:
    """Of one rank: all call it alike.

    Attributes:
        held: What the trial goes on with, once it has left; on rank 0.
    """

    def __init__(self, session: Session, state: TrainingState, saver: Saver) -> None:
        self.held: Held | None = None
        self._session = session
        self._run = session.run
        self._state = state
        self._saver = saver

    def save(self, step: int | None = None) -> None:
        """Begin to write a checkpoint, if it has what is trained and none is being written."""
        if self._state.is_empty:
            return
        found = self._captured(step)
        if found is not None:
            self._saver.save(found)

    def leave(self, step: int | None = None, *, stays: bool) -> None:
        """Leave the objective, at the epoch's end or before a step of it; return if that can't be.

        Args:
            step: Of the epoch's first pass.
            stays: The trial goes on with what rank 0's process has in memory; else when that is
                written.

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
