"""The check itself: which rehearsals are made, and what follows from them.

A is undisturbed, on one device. Z is as A, but moved. W is on several devices.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from optuna_fleet.preflight.comparison import (
    DOUBLE,
    ROUGH,
    SINGLE,
    apart,
    beyond,
    differences,
    unlike,
)
from optuna_fleet.preflight.notes import Ending, Key, Order, Rehearsed
from optuna_fleet.preflight.verdict import (
    Free,
    NotChecked,
    NotMoved,
    NotRepeatable,
    OneDevice,
    Plain,
    Verdict,
)

Run: TypeAlias = Callable[[Sequence[Sequence[Order]], float], list[list[Rehearsed]]]
"""As `Rehearsals.run`."""

_MORE_BATCHES = (2, 8, 32)  # where an optimizer takes its first step after some
_PATIENCE = 5.0
_ASIDE = ("variable", "trial.state", "state of the object")  # where readings of clocks may be


@dataclass(slots=True)
class Check:
    """Of one objective, with what is suggested to it.

    Attributes:
        order: What is rehearsed.
        run: Rehearses.
        first_limit_s: What the first rehearsal may take.
        least_s: The others may take so much, and five times what the first one took.
    """

    order: Order
    run: Run
    first_limit_s: float
    least_s: float = 60.0
    _began: float = field(default_factory=time.monotonic)
    _last_s: float = 0.0  # that the last rehearsals took, side by side
    _cpu_s: float = 0.0

    def verdict(self) -> Verdict:
        """Rehearse, and compare."""
        found, asked = self._found()
        wall_s = time.monotonic() - self._began
        return replace(found, params=self.order.params or asked, wall_s=wall_s, cpu_s=self._cpu_s)

    def _found(self) -> tuple[Verdict, Mapping[str, Any]]:
        alone = self._alone()
        asked = alone.params
        if alone.ending is Ending.PLAIN:
            return Plain(), asked
        if not alone.is_whole:
            what = "" if alone.ending is Ending.UNFIT else "on one device "
            return NotChecked(why=f"{what}{alone.problem}", traceback=alone.traceback), asked
        if not alone.num_steps and not alone.num_epochs:
            return NotChecked(why="it does not train"), asked
        limit_s = _PATIENCE * self._last_s + self.least_s
        width = 3 if all(size % 2 == 0 for size in alone.sizes) else 2
        several = [replace(self.order, rank=rank, world_size=width) for rank in range(width)]
        (moved,), ranks = self._ran([[replace(self.order, moves=True)], several], limit_s)
        return self._judged(alone, moved, ranks, limit_s), asked

    def _alone(self) -> Rehearsed:
        """Rehearse A: in float64 if that can be, and with so many batches that it takes steps."""
        for is_double in (True, False):
            for num_batches in _MORE_BATCHES:
                self.order = replace(self.order, is_double=is_double, num_batches=num_batches)
                ((found,),) = self._ran([[self.order]], self.first_limit_s)
                if not found.is_whole or found.num_steps or not found.num_epochs:
                    break
            if found.ending is not Ending.RAISED:
                break
        return found

    def _judged(
        self, alone: Rehearsed, moved: Rehearsed, ranks: Sequence[Rehearsed], limit_s: float
    ) -> Verdict:
        is_double = self.order.is_double
        tolerance = DOUBLE if is_double else ROUGH if alone.is_rough else SINGLE
        records = [rank.record for rank in ranks if rank.record]
        by_width, worst = apart(alone.record, records, tolerance, first_step=not is_double)
        failed = [rank for rank in ranks if not rank.is_whole]
        if failed:  # what it has not come to is no difference
            seen = set[Key]().union(*(rank.record for rank in ranks))
            by_width = {key: size for key, size in by_width.items() if key in seen}
        by_move = unlike(alone.record, moved.record) if moved.is_whole else {}
        if by_width or by_move:
            nudged = replace(self.order, is_nudged=True)
            (again,), (rounded,) = self._ran([[self.order], [nudged]], limit_s)
            unsteady = unlike(alone.record, again.record)
            if any(key.kind not in _ASIDE for key in unsteady) or not again.is_whole:
                return NotRepeatable(differences=differences(unsteady))
            readings = set(map(_without_places, unsteady))
            by_move = {k: s for k, s in by_move.items() if _without_places(k) not in readings}
            by_width = {k: s for k, s in by_width.items() if _without_places(k) not in readings}
            by_rounding, _ = apart(alone.record, [rounded.record], 0.0)
            by_width = beyond(by_width, by_rounding)
        moves = _moves(by_move, moved)
        if by_width or failed:
            problem = _problem(failed)
            return OneDevice(differences=differences(by_width), problem=problem, moves=moves)
        return moves or Free(worst=worst)

    def _ran(self, groups: Sequence[Sequence[Order]], limit_s: float) -> list[list[Rehearsed]]:
        ran = self.run(groups, limit_s)
        self._cpu_s += sum(one.cpu_s for group in ran for one in group)
        self._last_s = max(one.wall_s for group in ran for one in group)
        return ran


def _moves(by_move: dict[Key, float], moved: Rehearsed) -> NotMoved | None:
    if moved.refused or not moved.is_whole:
        return NotMoved(problem=moved.refused or f"moved, {moved.problem}")
    if not by_move:
        return None
    # A variable, or a rate, is the cause of what differs in the same mini-epoch, if earlier in it.
    first = next(iter(by_move))
    causes = [k for k in by_move if k[:2] == first[:2] and k.kind in ("variable", "learning rate")]
    causes.sort(key=lambda key: key.kind != "variable")
    return NotMoved(differences=differences({**dict.fromkeys(causes, math.inf), **by_move}))


def _without_places(key: Key) -> tuple[str, str]:
    """What it is of, whichever item of a list: times are equal by chance."""
    return key.kind, re.sub(r"\[-?\d+\]", "[]", key.name)


def _problem(failed: Sequence[Rehearsed]) -> str:
    if not failed:
        return ""
    causes = (Ending.RAISED, Ending.UNFIT, Ending.DIED, Ending.CUT_OFF, Ending.LATE)
    first = min(failed, key=lambda one: causes.index(one.ending))
    return f"it fails: {first.problem}"
