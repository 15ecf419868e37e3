"""How a rank leaves its devices, or stays where it stops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from optuna_fleet.events import MoveRefused
from optuna_fleet.trainer.checkpoints import checkpoint
from optuna_fleet.trainer.checkpoints.saving import Saver
from optuna_fleet.trainer.checkpoints.states import remainder_of, state_of
from optuna_fleet.trainer.gradients import collectives
from optuna_fleet.trainer.groups import of_first_rank
from optuna_fleet.trainer.moves.totals import Totals
from optuna_fleet.trainer.moves.within_epoch import EpochPosition
from optuna_fleet.trainer.pipeline_parallel.whole import WholeModel, are_in_stages, gathered
from optuna_fleet.trainer.session import Session
from optuna_fleet.trainer.unsaved.steps import Steps
from optuna_fleet.wire.calls import IsAmongBest
from optuna_fleet.wire.packing import pack, plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Where a run has stopped within an epoch, and what its ranks do not have in common.

    Attributes:
        step: The next one of the epoch's first pass.
        rng: `rng_state` of each rank.
        totals: What each rank has added to ``trial.totals``.
    """

    step: int
    rng: list[dict[str, Any]]
    totals: list[dict[str, Any]]


class Moving:
    """Makes the checkpoints of one rank's training.

    Args:
        session: This rank's calls.
        saver: Writes them.
        objects: What was prepared so far; grows while the objective runs.
        state: ``trial.state``.
        position: Where the objective is in its epochs.
        totals: Sums over the epoch.
        steps: What is done with the batches.

    Attributes:
        may_outlive: This rank may have to take rank 0's place.
    """

    def __init__(
        self,
        session: Session,
        saver: Saver,
        objects: Sequence[Any],
        state: dict[str, Any],
        position: EpochPosition,
        totals: Totals,
        steps: Steps,
    ) -> None:
        self._session = session
        self._saver = saver
        self._objects = objects
        self._state = state
        self._position = position
        self._totals = totals
        self._steps = steps
        self.may_outlive: Callable[[], bool] = lambda: False
        self._num_fit = 0  # objects of which a checkpoint was made

    def save(self, next_epoch: int, step: int | None = None) -> None:
        """Begin to write a checkpoint, if it has what is trained; called on all ranks."""
        if self._is_empty():
            return
        rng = checkpoint.gather_rng()
        totals = [] if step is None else checkpoint.gather(self._totals.own)
        with gathered(self._objects):
            if self._session.run.rank == 0 and not self._saver.is_busy:
                self._saver.save(lambda: self.checkpoint_at(next_epoch, rng, step, totals))

    def has_left(self, step: int | None = None) -> bool:
        """Write the checkpoint to leave with, at the epoch's end or before a step of it.

        A trial that can't keeps its devices.
        """
        self._saver.finish()
        self.save(self._position.epoch + (step is None), step)
        return self._agree(is_fit=self._saver.finish() and not self._is_empty())

    def stop(self, step: int, *, leader_stays: bool) -> Stop | None:
        """Stop within the epoch, without a checkpoint; called on all ranks.

        Args:
            step: Where.
            leader_stays: What only rank 0 has in memory is not lost.

        Returns:
            None if the trial can't be checkpointed, and keeps its devices.
        """
        self._saver.finish()
        rng, totals = checkpoint.gather_rng(), checkpoint.gather(self._totals.own)
        if not self._agree(is_fit=self._session.run.rank > 0 or self._is_fit()):
            return None
        stop = Stop(step=step, rng=rng, totals=totals)
        if self._session.run.rank == 0 and not leader_stays and self._saver.owes_best:
            self.save_at(stop)
        return stop

    def save_at(self, stop: Stop) -> None:
        """Write the checkpoint of where this rank has stopped."""
        self.begin_to_save_at(stop)
        self._saver.finish()

    def begin_to_save_at(self, stop: Stop) -> None:
        """Copy that checkpoint, which is written while training goes on."""
        self._saver.save(lambda: self.checkpoint_at_stop(stop))

    def checkpoint_at_stop(self, stop: Stop) -> checkpoint.Checkpoint:
        """The checkpoint of where this rank has stopped; not copied."""
        return self.checkpoint_at(self._position.epoch, stop.rng, stop.step, stop.totals)

    def _is_fit(self) -> bool:
        """Whether a checkpoint could be made; objects are copied once for that, not each time."""
        if self._is_empty():
            return False
        objects = self._objects if len(self._objects) > self._num_fit else ()
        is_fit = self._saver.can_copy(lambda: self._checkpoint_of(objects, self._position.epoch))
        if is_fit:
            self._num_fit = len(self._objects)
        return is_fit

    def _is_empty(self) -> bool:
        return self._position.reads_unprepared and not self._objects

    def _agree(self, *, is_fit: bool) -> bool:
        has_failed = bool(collectives.all_reduce_sum(int(not is_fit)))
        if has_failed and self._session.run.rank == 0:
            self._session.send(MoveRefused(run_id=self._session.run.run_id))
        return not has_failed

    # -- what is left in the end ------------------------------------------------------------------

    def begin_run(self) -> None:
        """Keep what led to the best report, if that may be left, be it when rank 0 is gone."""
        run = self._session.run
        self._session.reports.at_best = self._keep_best if run.leaves_final else None

    def end(self) -> None:
        """Keep nothing: it would keep the trial's memory."""
        self._session.reports.at_best = None

    def _keep_best(self) -> None:
        with gathered(self._objects):
            if self._objects and (self._session.run.rank == 0 or self.may_outlive()):
                self._saver.keep_best(self._as_it_is)

    def leave_final(self, value: Any) -> None:
        """The objective returned `value`: leave its weights behind, if they are among the best."""
        run = self._session.run
        if not run.leaves_final or not self._objects:
            return
        is_wanted = run.rank == 0 and self._is_wanted(value)
        if are_in_stages(self._objects):
            (is_wanted,) = map(bool, of_first_rank([is_wanted]))
        if not is_wanted:
            return
        with gathered(self._objects):
            if run.rank == 0:
                self._saver.leave(plain(value), self._as_it_is)

    def _is_wanted(self, value: Any) -> bool:
        try:
            return bool(self._session.ask(IsAmongBest, value=pack(plain(value))))
        except Exception:  # it can't be sent, say; the study will be told and say so
            return False

    # -- what is in them --------------------------------------------------------------------------

    def _as_it_is(self) -> checkpoint.Checkpoint:
        """What is prepared, as it is now."""
        return self.checkpoint_at(self._position.epoch + 1, [])

    def checkpoint_at(
        self,
        next_epoch: int,
        rng: list[dict[str, Any]],
        step: int | None = None,
        totals: list[dict[str, Any]] | None = None,
    ) -> checkpoint.Checkpoint:
        """The checkpoint to go on with at that epoch, and that step of it; not copied."""
        return self._checkpoint_of(self._objects, next_epoch, rng, step, totals)

    def _checkpoint_of(
        self,
        objects: Sequence[Any],
        next_epoch: int,
        rng: Sequence[dict[str, Any]] = (),
        step: int | None = None,
        totals: list[dict[str, Any]] | None = None,
    ) -> checkpoint.Checkpoint:
        return checkpoint.Checkpoint(
            loop=self._position.loop,
            epoch=next_epoch,
            objects=[state_of(thing) for thing in objects],
            state=self._state,
            rng=list(rng),
            history=self._session.reports.values,
            modules=[i for i, o in enumerate(objects) if _holds_module(o)],
            remainder=remainder_of(objects, with_gradients=self._steps.are_pending),
            parameters=dict(self._session.parameters),
            step=step,
            totals=totals or [],
        )


def _holds_module(thing: Any) -> bool:
    return isinstance(thing, torch.nn.Module | WholeModel)
