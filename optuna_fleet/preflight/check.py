"""The check itself: which rehearsals are made, and what follows from comparing their records.

A is undisturbed, on one device. Z is as A, but moved. W is on several devices.
"""

from __future__ import annotations

import math
import re
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np

from optuna_fleet.preflight.rehearsals import (
    Ending,
    Order,
    Record,
    Rehearsed,
    Sketch,
    Value,
    rehearsed,
)
from optuna_fleet.preflight.verdict import BEGIN, END, Differences, Key, Outcome, Verdict

_MORE_BATCHES = (2, 8, 32)  # where an optimizer takes its first step after some
_PATIENCE = 5.0
_ASIDE = ("variable", "trial.state", "state of the object")  # where readings of clocks may be

_DOUBLE = 1e-5
"""Good objectives differ by at most 1e-7 in float64, wrong ones by at least 5e-4."""
_SINGLE = 5e-3
"""Of the first step's gradients, where the objective does not bear float64."""
_ROUGH = 5e-2
"""Of these, where it computes in bfloat16 or float16."""
_FIRST = (1, 0, 1, "gradient")
_MARGIN = 100.0  # by which the difference of several devices may exceed one rounding's


@dataclass(slots=True)
class Check:
    """Of one objective, with what is suggested to it, in a process that `rehearsals` prepared.

    Attributes:
        order: What is rehearsed.
        first_limit_s: What the first rehearsal may take.
        least_s: The others may take so much, and five times what the first one took.
    """

    order: Order
    first_limit_s: float
    least_s: float = 60.0
    _last_s: float = 0.0  # that the last rehearsals took, side by side

    def verdict(self) -> Verdict:
        """Rehearse, and compare."""
        began = time.monotonic()
        alone = self._alone()
        found = self._found(alone)
        params, wall_s = self.order.params or alone.params, time.monotonic() - began
        return replace(found, params=params, wall_s=wall_s)

    def _found(self, alone: Rehearsed) -> Verdict:
        if alone.ending is Ending.PLAIN:
            return Verdict(outcome=Outcome.PLAIN)
        if not alone.is_whole:
            what = "" if alone.ending is Ending.UNFIT else "on one device "
            return _not_checked(f"{what}{alone.problem}", alone.traceback)
        if not alone.num_steps and not alone.num_epochs:
            return _not_checked("it does not train")
        limit_s = _PATIENCE * self._last_s + self.least_s
        width = 3 if all(size % 2 == 0 for size in alone.sizes) else 2
        several = [replace(self.order, rank=rank, world_size=width) for rank in range(width)]
        (moved,), ranks = self._ran([[replace(self.order, moves=True)], several], limit_s)
        return self._judged(alone, moved, ranks, limit_s)

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
        tolerance = _DOUBLE if is_double else _ROUGH if alone.is_rough else _SINGLE
        records = [rank.record for rank in ranks if rank.record]
        by_width, worst = _apart(alone.record, records, tolerance, first_step=not is_double)
        failed = [rank for rank in ranks if not rank.is_whole]
        if failed:  # what it has not come to is no difference
            seen = set[Key]().union(*(rank.record for rank in ranks))
            by_width = {key: size for key, size in by_width.items() if key in seen}
        by_move = _unlike(alone.record, moved.record) if moved.is_whole else {}
        if by_width or by_move:
            nudged = replace(self.order, is_nudged=True)
            (again,), (rounded,) = self._ran([[self.order], [nudged]], limit_s)
            unsteady = _unlike(alone.record, again.record)
            if any(key.kind not in _ASIDE for key in unsteady) or not again.is_whole:
                return Verdict(outcome=Outcome.NOT_REPEATABLE, differences=unsteady)
            readings = set(map(_without_places, unsteady))
            by_move = {k: s for k, s in by_move.items() if _without_places(k) not in readings}
            by_width = {k: s for k, s in by_width.items() if _without_places(k) not in readings}
            by_rounding, _ = _apart(alone.record, [rounded.record], 0.0)
            by_width = _beyond(by_width, by_rounding)
        not_moved = ""
        if moved.refused or not moved.is_whole:
            by_move, not_moved = {}, moved.refused or f"moved, {moved.problem}"
        outcome = Outcome.NOT_MOVED if by_move or not_moved else Outcome.FREE
        return Verdict(
            outcome=Outcome.ONE_DEVICE if by_width or failed else outcome,
            differences=by_width,
            problem=_problem(failed),
            moved=_causes_first(by_move),
            not_moved=not_moved,
            worst=worst,
        )

    def _ran(self, groups: Sequence[Sequence[Order]], limit_s: float) -> list[list[Rehearsed]]:
        began = time.monotonic()
        ran = rehearsed(groups, limit_s)
        self._last_s = time.monotonic() - began
        return ran


def _not_checked(why: str, traceback: str = "") -> Verdict:
    return Verdict(outcome=Outcome.NOT_CHECKED, problem=why, traceback=traceback)


def _causes_first(by_move: dict[Key, float]) -> Differences:
    """A variable, or a rate, is the cause of what differs in the same mini-epoch, if earlier."""
    if not by_move:
        return by_move
    first = next(iter(by_move))
    causes = [k for k in by_move if k[:2] == first[:2] and k.kind in ("variable", "learning rate")]
    causes.sort(key=lambda key: key.kind != "variable")
    return {**dict.fromkeys(causes, math.inf), **by_move}


def _without_places(key: Key) -> tuple[str, str]:
    """What it is of, whichever item of a list: times are equal by chance."""
    return key.kind, re.sub(r"\[-?\d+\]", "[]", key.name)


def _problem(failed: Sequence[Rehearsed]) -> str:
    if not failed:
        return ""
    first = min(failed, key=lambda one: [*Ending].index(one.ending))
    return f"it fails: {first.problem}"


# -- comparing ------------------------------------------------------------------------------------


def _unlike(record: Record, other: Record) -> dict[Key, float]:
    """What is not the same bit for bit, in the order of time.

    Not variables that don't change in the loop, like ``is_resumed = bool(trial.state)``: they hold
    nothing of the training, and what follows from them would differ itself.
    """
    fixed = _fixed(record)
    found = [
        key
        for key in {**record, **other}
        if record.get(key) != other.get(key)
        if key.kind != "variable"
        or (key in record and key in other and key.moment == END and key.name not in fixed)
    ]
    return dict.fromkeys(_sorted(found), math.inf)


def _fixed(record: Record) -> set[str]:
    """The variables that are there before the first loop, and stay as they are."""
    values: dict[str, list[Value]] = {}
    for key, value in record.items():
        if key.kind == "variable" and (key.name in values or (key.loop, key.moment) == (1, BEGIN)):
            values.setdefault(key.name, []).append(value)
    return {name for name, all_ in values.items() if all(all_[0] == each for each in all_)}


def _apart(
    record: Record, ranks: Sequence[Record], tolerance: float, *, first_step: bool = False
) -> tuple[dict[Key, float], float]:
    """What several ranks have unlike one device, in the order of time; the largest of the rest.

    Args:
        record: Of one device.
        ranks: Of each of several.
        tolerance: By what part of the largest number of its kind something may differ.
        first_step: Compare gradients before the first step only.
    """
    largest: dict[Any, float] = {}
    for key, value in record.items():
        if isinstance(value, Sketch):
            largest[_group(key)] = max(largest.get(_group(key), 0.0), value.largest)
    distances: dict[Key, float] = {}
    for rank in ranks:
        for key in {**record, **rank}:
            if key.kind != "variable" and (key[:4] == _FIRST or not first_step):
                size = _distance(record.get(key), rank.get(key), largest.get(_group(key), 0.0))
                distances[key] = max(size, distances.get(key, 0.0))
    found = {key: distances[key] for key in _sorted(distances) if distances[key] > tolerance}
    worst = max((size for size in distances.values() if size <= tolerance), default=0.0)
    return found, worst


def _beyond(found: dict[Key, float], by_rounding: dict[Key, float]) -> dict[Key, float]:
    """What differs by more than what a rounding's difference has grown to by then."""
    moments = [key.order for key in by_rounding]
    grown = [0.0, *accumulate(by_rounding.values(), max)]
    most = {key: _MARGIN * grown[bisect_right(moments, key.order)] for key in found}
    return {key: size for key, size in found.items() if size > most[key]}


def _sorted(keys: Any) -> list[Key]:
    return sorted(keys, key=lambda key: key.order)


def _group(key: Key) -> Any:
    """What it is compared within: what is zero but for rounding has no size of its own."""
    if key.kind in ("gradient", "parameter"):
        return key[:4]
    name = key.name.rpartition(".")[2] if key.kind == "buffer" else key.name.partition(" of ")[0]
    return *key[:4], name


def _distance(value: Value, other: Value, largest: float) -> float:
    if value == other:
        return 0.0
    if not isinstance(value, Sketch) or not isinstance(other, Sketch):
        return math.inf
    numbers, others = value.numbers, other.numbers
    finite = np.isfinite(numbers)
    if value.shape != other.shape or not np.array_equal(finite, np.isfinite(others)):
        return math.inf
    most = float(np.abs(numbers[finite] - others[finite]).max(initial=0.0))
    return most and most / max(largest, other.largest)
