"""Compares what rehearsals have noted. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from optuna_fleet.preflight.notes import BEGIN, END, Key, Record, Sketch, Value
from optuna_fleet.preflight.verdict import Difference

DOUBLE = 1e-5
"""Good objectives differ by at most 1e-7 in float64, wrong ones by at least 5e-4."""
SINGLE = 5e-3
"""Of the first step's gradients, where the objective does not bear float64."""
ROUGH = 5e-2
"""Of these, where it computes in bfloat16 or float16."""
_FIRST = (1, 0, 1, "gradient")
_MARGIN = 100.0  # by which the difference of several devices may exceed one rounding's


def unlike(record: Record, other: Record) -> dict[Key, float]:
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


def apart(
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


def beyond(found: dict[Key, float], by_rounding: dict[Key, float]) -> dict[Key, float]:
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


def differences(found: dict[Key, float]) -> tuple[Difference, ...]:
    """For the user."""
    return tuple(
        Difference(
            kind=key.kind,
            name=key.name,
            size=size,
            loop=key.loop,
            epoch=key.epoch,
            step=None if key.moment == END else key.moment,
        )
        for key, size in found.items()
    )
