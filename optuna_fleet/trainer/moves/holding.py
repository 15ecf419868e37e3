"""What a rank could go on from if other ranks die: the beginning of the step that it is at.

Of what a step changes before its optimizer steps (buffers, generators, ``trial.state``) there is a
copy. What only the optimizer changes (parameters, momentum) is as it was until then; and after
that nothing fails in most loops, until the rank has come to the next step. So survivors of a death
are at two steps at most, one after the other, and the later one is where the trial goes on.

What a rank has added to ``trial.totals`` dies with it, so all tell it to the others, during each
backward pass. That is in time if nothing is added later. Where a loop does that, or needs other
ranks after its optimizer has stepped, ranks tell at the beginning of each step too; and as often
as is cheap, they copy parameters before the optimizer steps. Likewise in an epoch's last step.
"""

from __future__ import annotations

import enum
import pickle
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from optuna_fleet.trainer.checkpoints import checkpoint
from optuna_fleet.trainer.checkpoints.saving import Saver
from optuna_fleet.trainer.checkpoints.states import remainder_of, state_of
from optuna_fleet.trainer.groups import group_size, outlives_peers
from optuna_fleet.trainer.moves.object_copies import Contents, ObjectCopies
from optuna_fleet.trainer.moves.totals import Sums, SumsExchange, Told
from optuna_fleet.trainer.parts import Parts
from optuna_fleet.trainer.randomness import FrequentStates
from optuna_fleet.wire.messages import Place

_MOST_STATE_BYTES = 2**20  # of `trial.state`: more would take longer than many steps
_WHOLE_SHARE = 0.025  # of the time, for copies of what optimizers change
_LOOK_EVERY = 7  # steps; a prime, or what is done in every other step might be missed


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
    rng: dict[str, Any]
    state: bytes
    history: dict[int, float]

    def is_told(self) -> bool:
        """Whether it is known what all ranks had added; waits for nobody."""
        return self.told is None or self.told.has_arrived()

    def is_good(self) -> bool:
        """Whether the trial can go on from it."""
        is_past = self.objects.has_stepped and self.objects.late is None
        return self.is_told() and not is_past and not self.objects.changed()


class Holding:
    """Keeps the beginning of the step that this rank is at, and the last one copied as a whole."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._session = parts.session
        self._steps = parts.steps
        self._shares = parts.weights
        self._totals = parts.totals
        self._exchange = SumsExchange()
        self._generators = FrequentStates()
        self._contents: Contents | None = None  # of the objects, in this epoch
        self._kept: _Beginning | None = None  # copied as a whole
        self._copied_at, self._copies_s = 0.0, deque([0.0], maxlen=2)
        self._by_hand: set[int] = set()  # parameters that are changed before an optimizer steps
        self._can_hold = self._can_copy = True
        self._has_held = False  # in this epoch
        self.begin_run()
        self._steps.at_step = self._before_optimizer
        self._steps.at_stepped = self._after_optimizer

    @property
    def is_empty(self) -> bool:
        """Whether nothing is kept."""
        return self._now is None and self._kept is None

    def begin_run(self) -> None:
        """Another group of ranks goes on here."""
        self._exchange.begin_run()
        self._now: _Beginning | None = None
        self._told: Told | None = None  # the last; it may be on its way
        self._is_awaited = False  # it is
        self._num_told = 0  # additions to the totals that it has
        self._follows = Follows.UNKNOWN  # on any rank that this one knows of
        self._is_plain = False  # nothing follows on any rank, as all have heard
        self._is_last = self._is_in_step = False
        self._num_steps = 0  # whose beginnings were kept
        self._num_added: int | None = None  # to the totals, when gradients were reduced
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
        is_first = place[-1] == 0 or not self._is_in_step
        if place[-1] > 0:
            self._look_back()
        elif self._is_in_step and not self._is_last:
            self._follows = Follows.SOMETHING  # it leaves its passes early
        if not self._is_plain or self._num_added is None:
            self._tell()
        self._is_last, self._is_in_step, self._has_held = is_last, True, True
        self._num_added = self._counts = None
        if is_first:
            self._contents = None
            self._hold(place, None)
        elif self._told is not None and self._num_told == self._totals.num_added:
            self._hold(place, self._told)
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
        self._told = self._exchange.tell(self._totals.own, self._follows)
        self._num_told, self._is_awaited = self._totals.num_added, True

    def settle(self) -> None:
        """Wait until all have told what they were to.

        Raises:
            RuntimeError: A rank is gone.
        """
        if self._is_awaited and self._told is not None:
            self._is_awaited = False
            follows = Follows(self._exchange.hear(self._told))
            self._is_plain = follows is Follows.NOTHING
            if follows is Follows.SOMETHING:
                self._follows = follows

    def _hold(self, place: Place, told: Told | None) -> None:
        if not self._can_hold:
            return
        try:
            if self._contents is None or len(self._contents.objects) < len(self._parts.objects):
                self._contents = Contents(self._parts.objects, self._by_hand)
            state = pickle.dumps(self._parts.state)
            if len(state) > _MOST_STATE_BYTES:
                self._can_hold = False
                self._session.remark(("large trial.state",), _too_large(len(state)))
            self._now = _Beginning(
                place=place,
                told=told,
                begun=self._totals.begun,
                objects=ObjectCopies.of(self._contents, with_gradients=self._steps.are_pending),
                rng=self._generators.now(),
                state=state,
                history=dict(self._session.reports.values),
            )
        except Exception:  # of memory, or there is something that can't be kept
            self._can_hold = False
        if not self._can_hold:
            self._now = self._kept = None

    def _before_gradients(self) -> torch.Tensor | None:
        """They are about to be reduced: what travels along."""
        if not self._is_in_step or self._num_added is not None:
            return None
        self.settle()
        self._num_added = self._totals.num_added
        return self._exchange.beside(self._totals.own, self._follows)

    def _reduced(self, added: torch.Tensor) -> None:
        assert self._num_added is not None
        self._told, self._num_told = self._exchange.added(added), self._num_added
        self._is_awaited = True
        self.settle()

    def _before_optimizer(self) -> None:
        """One is about to step."""
        self.settle()
        if not self._is_in_step or self._counts is not None:
            return
        self._counts = self._count()
        if (now := self._now) is None:
            return
        is_copied = self._is_last or self._needs_copy()
        is_due = self._num_steps % _LOOK_EVERY == 0
        self._num_steps += 1
        if (is_copied or is_due) and (changed := now.objects.changed()):
            self._by_hand |= changed
            self._now = self._contents = None
        elif is_copied and now.is_told():
            self._copy(now)

    def _after_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """One has stepped."""
        if self._now is not None and any(o is optimizer for o in self._parts.objects):
            self._now.objects.has_stepped = True

    def _needs_copy(self) -> bool:
        return not self._is_plain and (self._follows is not Follows.SOMETHING or self.is_due())

    def is_due(self) -> bool:
        """Whether a copy that takes as long as the faster of the last two keeps to its share."""
        since_s = time.perf_counter() - self._copied_at
        return _WHOLE_SHARE * since_s >= min(self._copies_s)

    def _copy(self, now: _Beginning) -> None:
        """Copy what the optimizer will change, where the last such copies are."""
        if not self._can_copy:
            return
        spare, self._kept = self._kept, None
        began = time.perf_counter()
        try:
            now.objects.copy_late(None if spare is None else spare.objects.late)
            self._kept = now
        except Exception:
            self._can_copy = False
        self._copied_at = time.perf_counter()
        self._copies_s.append(self._copied_at - began)

    def end(self) -> None:
        """Keep nothing: it would keep the trial's memory."""
        self._now = self._kept = self._told = self._contents = None
        self._is_in_step = False

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
            saver=self._parts.saver,
        )

    def _checkpoint(self, one: _Beginning) -> checkpoint.Checkpoint:
        others, things = one.objects.put_back(), one.objects.contents.objects
        loop, epoch, step = one.place
        return checkpoint.Checkpoint(
            loop=loop,
            epoch=epoch,
            objects=[
                others[position] if position in others else state_of(thing)
                for position, thing in enumerate(things)
            ],
            state=pickle.loads(one.state),
            rng=[one.rng],
            history=one.history,
            modules=[i for i, o in enumerate(things) if isinstance(o, torch.nn.Module)],
            remainder=remainder_of(things, with_gradients=True),
            parameters=dict(self._session.parameters),
            step=step,
            totals=one.begun if one.told is None else one.told.parts(),
        )


def _too_large(nbytes: int) -> str:
    return (
        f"`trial.state` takes {nbytes / 2**20:.1f} MiB, and is copied in each step up to 1 MiB: "
        "should one of several ranks die, its trial goes on from its last checkpoint. "
        "Tensors can be buffers of a module instead, of any size."
    )
