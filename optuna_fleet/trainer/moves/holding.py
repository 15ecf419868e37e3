"""What a rank could go on from if other ranks die: the beginning of a step not long ago.

Every n-th step is held (`pace`). Who has come to such a step, and has heard that all others have,
holds its beginning, and no longer the one before. Nobody can end the step before that, so what
survivors hold are two of these at most, one after the other. The later one is where the trial goes
on, and the batches since are computed again: one at most where every step is held.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from optuna_fleet.trainer.checkpoints import checkpoint
from optuna_fleet.trainer.checkpoints.saving import Saver
from optuna_fleet.trainer.checkpoints.states import remainder_of, state_of
from optuna_fleet.trainer.gradients.shares import BatchShares
from optuna_fleet.trainer.groups import group_size, outlives_peers
from optuna_fleet.trainer.moves.moving import Moving
from optuna_fleet.trainer.moves.object_copies import Late, ObjectCopies
from optuna_fleet.trainer.moves.pace import Pace
from optuna_fleet.trainer.moves.sums_exchange import SumsExchange, Told
from optuna_fleet.trainer.moves.totals import Totals
from optuna_fleet.trainer.randomness import rng_state
from optuna_fleet.trainer.session import Session
from optuna_fleet.trainer.unsaved.steps import Steps
from optuna_fleet.wire.messages import Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a rank has in memory when it has left the objective.

    Attributes:
        run_id: Of the run that has lost other ranks.
        place: The step that the trial can go on with.
        checkpoint: What it needs for that.
        saver: Can write it.
    """

    run_id: int
    place: Place
    checkpoint: checkpoint.Checkpoint
    saver: Saver

    def save(self) -> None:
        """Write it, and tell the driver."""
        self.saver.save(lambda: self.checkpoint)
        self.saver.finish()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Beginning:
    """Of a step: all that it may change."""

    place: Place
    told: Told
    objects: ObjectCopies
    things: list[Any]
    rng: dict[str, Any]
    state: bytes
    history: dict[int, float]


class Holding:
    """Keeps the beginnings of the last steps that this rank held.

    Args:
        session: This rank's calls.
        objects: What was prepared so far; grows while the objective runs.
        state: ``trial.state``.
        steps: Tells when optimizers step, and whether gradients wait.
        shares: Counts the ranks' collectives.
        totals: Sums over the epoch.
        moving: Told whether this rank holds anything.
        saver: Writes checkpoints.

    Attributes:
        pace: Says which steps are held.
    """

    def __init__(
        self,
        session: Session,
        objects: Sequence[Any],
        state: dict[str, Any],
        steps: Steps,
        shares: BatchShares,
        totals: Totals,
        moving: Moving,
        saver: Saver,
    ) -> None:
        self._session = session
        self._objects = objects
        self._state = state
        self._steps = steps
        self._shares = shares
        self._totals = totals
        self._saver = saver
        self._exchange = SumsExchange()
        self.pace = Pace()
        self._last: _Beginning | None = None  # all ranks have come to it
        self._next: _Beginning | Told | None = None  # this rank has
        self._spare: Late | None = None
        self._can_copy = True
        moving.may_outlive = lambda: self._last is not None
        steps.at_step = self._before_optimizer

    def begin_step(self, place: Place) -> None:
        """This rank has come to a step: if that is due, it keeps its beginning, and says so."""
        if not outlives_peers():
            return
        self.settle()
        if not self.pace.is_due(place):
            return
        with self.pace.spending():
            self._shares.begin("trial.totals")
            told = self._exchange.tell(self._totals.own, self.pace.wish())
            self._next = self._beginning(place, told) or told

    def _beginning(self, place: Place, told: Told) -> _Beginning | None:
        if not self._can_copy:
            return None
        try:
            return _Beginning(
                place=place,
                told=told,
                objects=ObjectCopies.of(self._objects, with_gradients=self._steps.are_pending),
                things=list(self._objects),
                rng=rng_state(),
                state=pickle.dumps(self._state),
                history=dict(self._session.reports.values),
            )
        except Exception:  # of memory, or there is something that can't be kept
            self._give_up()
            return None

    def settle(self) -> None:
        """Wait until all have come to the step held last: none will go back beyond it.

        Raises:
            RuntimeError: A rank is gone.
        """
        following, self._next = self._next, None
        if following is None:
            return
        told = following.told if isinstance(following, _Beginning) else following
        try:
            is_whole = self._exchange.hear(told)
        except BaseException:
            self._next = following
            raise
        self.pace.agree(told.greatest_wish() if is_whole else 1)
        if isinstance(following, _Beginning) and is_whole:
            self._spare = None if self._last is None else self._last.objects.late
            self._last = following

    def _before_optimizer(self) -> None:
        """An optimizer is about to step."""
        self.settle()
        last = self._last
        if last is None or last.objects.late is not None:
            return
        if not last.objects.is_as_it_was():  # the objective has changed it before
            self._last = None
            return
        try:
            with self.pace.spending():
                last.objects.copy_late(self._spare)
        except Exception:
            self._give_up()
        self._spare = None

    def _give_up(self) -> None:
        self._can_copy, self._last, self._spare = False, None, None

    def begin_run(self) -> None:
        """Another group of ranks goes on here."""
        self._next = None
        self.pace.begin_run()
        self._exchange.begin_run()
        if group_size() == 1:
            self._forget()

    def end(self) -> None:
        """Keep nothing: it would keep the trial's memory."""
        self._forget()
        self._steps.at_step = lambda: None

    def _forget(self) -> None:
        self._next = self._last = self._spare = None

    def held(self) -> Held | None:
        """Others are gone: go back to what this rank holds, if it does."""
        known = [self._next, self._last]
        self.end()
        for one in known:
            if (
                isinstance(one, _Beginning)
                and one.told.has_arrived()
                and one.objects.is_as_it_was()
            ):
                return Held(
                    run_id=self._session.run.run_id,
                    place=one.place,
                    checkpoint=self._checkpoint(one),
                    saver=self._saver,
                )
        return None

    def _checkpoint(self, one: _Beginning) -> checkpoint.Checkpoint:
        others = one.objects.put_back()
        loop, epoch, step = one.place
        return checkpoint.Checkpoint(
            loop=loop,
            epoch=epoch,
            objects=[
                others[position] if position in others else state_of(thing)
                for position, thing in enumerate(one.things)
            ],
            state=pickle.loads(one.state),
            rng=[one.rng],
            history=one.history,
            modules=[i for i, o in enumerate(one.things) if isinstance(o, torch.nn.Module)],
            remainder=remainder_of(one.things, with_gradients=True),
            parameters=dict(self._session.parameters),
            step=step,
            totals=one.told.parts(),
        )
