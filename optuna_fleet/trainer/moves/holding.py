"""What a rank could go on from if other ranks die: the beginning of the step that it is at.

Of what a step changes before its optimizer steps (buffers, generators, ``trial.state``) there is a
copy. What only the optimizer changes (parameters, momentum) is as it was until then; and after
that nothing fails in most loops, until the rank has come to the next step. So survivors of a death
are at two steps at most, one after the other, and the later one is where the trial goes on.

What a rank has added to ``trial.totals`` dies with it, so all tell it to the others, during each
backward pass. That is in time if nothing is added later. Where a loop does that, or needs other
ranks after its optimizer has stepped, ranks tell at the beginning of each step; and as often as is
cheap, they copy parameters too before the optimizer steps. Likewise in the last step of an epoch.
"""

from __future__ import annotations

import enum
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
from optuna_fleet.trainer.moves.budget import Budget
from optuna_fleet.trainer.moves.moving import Moving
from optuna_fleet.trainer.moves.object_copies import ObjectCopies
from optuna_fleet.trainer.moves.sums_exchange import SumsExchange, Told
from optuna_fleet.trainer.moves.totals import Sums, Totals
from optuna_fleet.trainer.randomness import rng_state
from optuna_fleet.trainer.session import Session
from optuna_fleet.trainer.unsaved.steps import Steps
from optuna_fleet.wire.messages import Place

_SMALL_SHARE = 0.2  # of the time; far more than they need, but where `trial.state` is large
_WHOLE_SHARE = 0.025


class Follows(enum.IntEnum):
    """What happens in a step after its optimizer has stepped that other ranks have to do with."""

    NOTHING = 0
    UNKNOWN = 1
    SOMETHING = 2


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
    """Of a step: all that it may change. If `told` is None, ranks have added what they began with.

    That is so in the first step of a run, or of an epoch.
    """

    place: Place
    told: Told | None
    begun: list[Sums]
    objects: ObjectCopies
    things: list[Any]
    rng: dict[str, Any]
    state: bytes
    history: dict[int, float]

    def is_good(self) -> bool:
        """Whether the trial can go on from it."""
        return (self.told is None or self.told.has_arrived()) and not self.objects.changed()


class Holding:
    """Keeps the beginning of the step that this rank is at, and the last one copied as a whole.

    Args:
        session: This rank's calls.
        objects: What was prepared so far; grows while the objective runs.
        state: ``trial.state``.
        steps: Tells when optimizers step, and whether gradients wait.
        shares: Tells when gradients are about to be reduced, and counts collectives.
        totals: Sums over the epoch.
        moving: Told whether this rank holds anything.
        saver: Writes checkpoints.

    Attributes:
        small: For the beginnings of steps.
        whole: For copies of what optimizers change, where a loop needs these often.
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
        self.small, self.whole = Budget(_SMALL_SHARE), Budget(_WHOLE_SHARE)
        self._kept: _Beginning | None = None  # copied as a whole
        self._by_hand: set[int] = set()  # parameters that are changed before an optimizer steps
        self._can_hold = self._can_copy = True
        self._has_held = False  # in this epoch
        self.begin_run()
        moving.may_outlive = lambda: self._now is not None or self._kept is not None
        steps.at_step = self._before_optimizer
        shares.at_gradients, shares.at_reduced = self._before_gradients, self._reduced

    def begin_run(self) -> None:
        """Another group of ranks goes on here."""
        self._exchange.begin_run()
        self._now: _Beginning | None = None
        self._told: Told | None = None  # on its way
        self._heard: Told | None = None  # the last, if it has arrived as a whole
        self._follows = Follows.UNKNOWN  # on this rank
        self._nothing_follows = False  # on any rank, as all have heard
        self._tells_in_backward = False  # in this step
        self._is_last = self._is_in_step = False
        self._num_added: int | None = None  # to the totals, when gradients were reduced
        self._num_told = self._num_beside = 0  # of these; and with the gradients
        self._counts: tuple[int, int] | None = None  # when an optimizer was to step
        if group_size() == 1:
            self._kept = None

    def begin_epoch(self) -> None:
        """Forget what an epoch before the last has left: a checkpoint may be further."""
        if not self._has_held:
            self._now = self._kept = None
        self._has_held = False

    def begin_step(self, place: Place, *, is_last: bool) -> None:
        """This rank has come to a step: it keeps its beginning.

        Args:
            place: The step.
            is_last: Of the epoch, after which other ranks are needed.
        """
        if not outlives_peers():
            return
        self.settle()
        if place[-1] > 0:
            self._look_back()
        elif self._is_in_step and not self._is_last:
            self._follows = Follows.SOMETHING  # it leaves its passes early
        is_first = place[-1] == 0 or not self._is_in_step
        # Unless what was added in the last step was told in its backward pass, if it had one.
        has_told = self._tells_in_backward and self._num_added is not None
        tells_now = not (self._nothing_follows and has_told)
        self._tells_in_backward = self._nothing_follows
        if tells_now:
            self._tell()
        told = self._told if tells_now else self._heard
        is_told = told is not None and self._totals.num_added == self._num_told
        self._is_last, self._is_in_step, self._has_held = is_last, True, True
        self._num_added = self._counts = None
        if is_first:
            self._hold(place, None)
        elif is_told:
            self._hold(place, told)
        else:
            self._now = None

    def _look_back(self) -> None:
        """Whether anything has followed in the last step."""
        if self._num_added is None:
            return
        if self._totals.num_added != self._num_added or self._counts not in (None, self._count()):
            self._follows = Follows.SOMETHING
        elif self._follows is Follows.UNKNOWN:
            self._follows = Follows.NOTHING

    def _count(self) -> tuple[int, int]:
        return self._session.num_calls, self._shares.collectives[-1][0]

    def _tell(self) -> None:
        self._shares.begin("trial.totals")
        self._num_told = self._totals.num_added
        self._told = self._exchange.tell(self._totals.own, self._follows)

    def settle(self) -> None:
        """Wait until all have told what they were to.

        Raises:
            RuntimeError: A rank is gone.
        """
        told, self._told = self._told, None
        if told is not None:
            self._hear(told)

    def _hear(self, told: Told) -> None:
        is_whole = self._exchange.hear(told)
        follows = Follows(told.greatest_note())
        self._nothing_follows = follows is Follows.NOTHING
        if follows is Follows.SOMETHING:
            self._follows = follows
        self._heard = told if is_whole else None
        if not is_whole and self._now is not None and self._now.told is told:
            self._now = None

    def _hold(self, place: Place, told: Told | None) -> None:
        if not self._can_hold:
            return
        if not (self._is_last or self.small.is_enough()):
            self._follows = Follows.SOMETHING  # the steps that this leaves out
            return
        try:
            with self.small.spending():
                self._now = _Beginning(
                    place=place,
                    told=told,
                    begun=self._totals.begun,
                    objects=ObjectCopies.of(
                        self._objects,
                        self._by_hand,
                        with_gradients=self._steps.are_pending,
                    ),
                    things=list(self._objects),
                    rng=rng_state(),
                    state=pickle.dumps(self._state),
                    history=dict(self._session.reports.values),
                )
        except Exception:  # of memory, or there is something that can't be kept
            self._can_hold, self._now, self._kept = False, None, None

    def _before_gradients(self) -> torch.Tensor | None:
        """They are about to be reduced: what travels along."""
        if not self._is_in_step or self._num_added is not None:
            return None
        self._num_added = self._num_beside = self._totals.num_added
        if not self._tells_in_backward:
            return None
        self.settle()
        return self._exchange.beside(self._totals.own, self._follows)

    def _reduced(self, added: torch.Tensor) -> None:
        self._num_told = self._num_beside
        self._hear(self._exchange.added(added))

    def _before_optimizer(self) -> None:
        """One is about to step."""
        self.settle()
        if not self._is_in_step or self._counts is not None:
            return
        self._counts = self._count()
        if (now := self._now) is None:
            return
        if changed := now.objects.changed():
            self._by_hand |= changed
            self._now = None
        elif self._is_last or not (self._tells_in_backward or self._is_too_dear()):
            self._copy(now)

    def _is_too_dear(self) -> bool:
        return self._follows is Follows.SOMETHING and not self.whole.is_enough()

    def _copy(self, now: _Beginning) -> None:
        """Copy what the optimizer will change, where the last such copies are."""
        if not self._can_copy:
            return
        spare, self._kept = self._kept, None
        try:
            with self.whole.spending():
                now.objects.copy_late(None if spare is None else spare.objects.late)
            self._kept = now
        except Exception:
            self._can_copy = False

    def end(self) -> None:
        """Keep nothing: it would keep the trial's memory."""
        self._now = self._kept = self._told = self._heard = None
        self._is_in_step = False
        self._steps.at_step = lambda: None
        self._shares.at_gradients, self._shares.at_reduced = lambda: None, lambda added: None

    def held(self) -> Held | None:
        """Others are gone: go back to what this rank holds, if it does."""
        known = self._now, self._kept
        self.end()
        one = next((one for one in known if one is not None and one.is_good()), None)
        if one is None:
            return None
        return Held(
            run_id=self._session.run.run_id,
            place=one.place,
            checkpoint=self._checkpoint(one),
            saver=self._saver,
        )

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
            totals=one.begun if one.told is None else one.told.parts(),
        )
