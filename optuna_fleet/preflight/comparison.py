"""Compares what rehearsals have noted. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from optuna_fleet.preflight.records import BEGIN, END, Key, Record, Sketch, Value
from optuna_fleet.preflight.verdict import Difference

Numbers: TypeAlias = npt.NDArray[Any]

DOUBLE = 1e-5
"""Good objectives differ by at most 1e-7 in float64, wrong ones by at least 5e-4."""
SINGLE = 5e-3
"""Of the first step's gradients, where the objective does not bear float64."""
ROUGH = 5e-2
"""Of these, where it computes in bfloat16 or float16."""


def unlike(record: Record, other: Record) -> dict[Key, float]:
    """What is not the same bit for bit, in the order of time.

    Not variables that don't change in the loop, like ``is_resumed = bool(trial.state)``: they hold
    nothing of the training, and what follows from them would differ itself.
    """
    fixed = _fixed(record)
    found = [
        key
        for key in record
        if key in other and not _same(record[key], other[key])
        if key.kind != "variable" or (key.moment == END and key.name not in fixed)
    ]
    alone = [key for key in record.keys() ^ other.keys() if key.kind != "variable"]
    return dict.fromkeys(sorted({*found, *alone}, key=lambda key: key.order), math.inf)


def _fixed(record: Record) -> set[str]:
    """The variables that are there before the first loop, and stay as they are."""
    values: dict[str, list[Value]] = {}
    for key, value in record.items():
        if key.kind == "variable" and (key.name in values or (key.loop, key.moment) == (1, BEGIN)):
            values.setdefault(key.name, []).append(value)
    return {name for name, all_ in values.items() if all(_same(all_[0], each) for each in all_)}


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
    found: dict[Key, float] = {}
    worst = 0.0
    largest = _largest(record)
    for rank in ranks:
        for key in sorted(record.keys() | rank.keys(), key=lambda key: key.order):
            if key.kind == "variable" or (first_step and not _is_first(key)):
                continue
            if (key in record) != (key in rank):
                distance = math.inf
            else:
                distance = _distance(record[key], rank[key], largest.get(_group(key), 0.0))
            if distance <= tolerance:
                worst = max(worst, distance)
            else:
                found[key] = max(distance, found.get(key, 0.0))
    return dict(sorted(found.items(), key=lambda item: item[0].order)), worst


def _is_first(key: Key) -> bool:
    return key.kind == "gradient" and (key.loop, key.epoch, key.moment) == (1, 0, 1)


def differences(found: dict[Key, float]) -> tuple[Difference, ...]:
    """For the user."""
    return tuple(_differences(found))


def _differences(found: dict[Key, float]) -> Iterator[Difference]:
    for key, size in found.items():
        step = None if key.moment == END else key.moment
        yield Difference(
            kind=key.kind, name=key.name, size=size, loop=key.loop, epoch=key.epoch, step=step
        )


def _same(value: Value, other: Value) -> bool:
    if isinstance(value, Sketch) and isinstance(other, Sketch):
        return value.digest == other.digest
    return type(value) is type(other) and (value == other or (value != value and other != other))


def _group(key: Key) -> tuple[int, int, int, str]:
    """What it is compared within: what is zero but for rounding has no size of its own."""
    kind = key.kind
    if kind == "optimizer state":
        kind = key.name.partition("[")[2] or key.name
        kind = kind.partition("]")[0]
    elif kind not in ("gradient", "parameter"):
        kind = key.name
    return key.loop, key.epoch, key.moment, kind


def _largest(record: Record) -> dict[tuple[int, int, int, str], float]:
    found: dict[tuple[int, int, int, str], float] = {}
    for key, value in record.items():
        if isinstance(value, Sketch):
            found[_group(key)] = max(found.get(_group(key), 0.0), value.largest)
    return found


def _distance(value: Value, other: Value, largest: float) -> float:
    if isinstance(value, Sketch) and isinstance(other, Sketch):
        if value.shape != other.shape:
            return math.inf
        return _of_numbers(value.numbers, other.numbers, largest)
    numbers = (bool, int, float, complex)
    if not isinstance(value, numbers) or not isinstance(other, numbers):
        return 0.0 if value == other else math.inf
    if isinstance(value, bool) or isinstance(other, bool) or value == other:
        return 0.0 if value == other else math.inf
    pair = np.array([value]), np.array([other])
    return _of_numbers(*pair, max(abs(value), abs(other)))


def _of_numbers(numbers: Numbers, other: Numbers, largest: float) -> float:
    if not numbers.size or np.array_equal(numbers, other, equal_nan=True):
        return 0.0
    if not np.array_equal(np.isfinite(numbers), np.isfinite(other)):
        return math.inf
    finite = np.isfinite(numbers)
    most = float(np.abs(numbers[finite] - other[finite]).max(initial=0.0))
    return most / max(largest, 1e-30) if most else 0.0
