"""Which local variables of the objective change from epoch to epoch: a move loses them."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import islice
from types import FrameType, NoneType
from typing import Any

import numpy as np
import torch

from optuna_fleet.trainer.unsaved.loops import Loop, variables_of

_NUMBERS = (bool, int, float, complex, NoneType)
_DICTS = (dict, defaultdict, OrderedDict, Counter)
_CONTAINERS = (*_DICTS, list, tuple, set, deque)
_TENSORS = (torch.Tensor, torch.nn.Parameter, np.ndarray)
_CLOCKS = (time.time, time.perf_counter, time.time_ns, time.perf_counter_ns)
_DEPTH = 3
_MANY = 10


@dataclass(frozen=True, slots=True)
class Variables:
    """What plain data the variables of a frame hold; none of it is kept alive."""

    marks: dict[str, Any]
    sizes: dict[str, dict[int, Any]]
    clocks: list[float] = field(default_factory=lambda: [clock() for clock in _CLOCKS])

    @classmethod
    def of(cls, frame: FrameType) -> Variables:
        """Look at the variables of `frame` as they are."""
        variables = variables_of(frame)
        marks = {name: mark for name, value in variables.items() if (mark := mark_of(value))}
        return cls(marks, {name: dict(_sizes(variables[name])) for name in marks})


def carried(frame: FrameType, first: Variables, begun: Variables, kept: set[Any]) -> list[str]:
    """Return the variables that carry something from the epoch that ended into the next.

    Numbers and strings that it changed, where the next epoch or what follows the loop may read
    them; and containers that have grown in two epochs running.

    Args:
        frame: It is about to ask for the next epoch.
        first: Its variables before the first epoch.
        begun: Its variables before the epoch that ended.
        kept: `marks_in` what is checkpointed.
    """
    if "user_attrs" in frame.f_code.co_names:  # which may be where it finds them again
        return []
    now = Variables.of(frame)
    loop = Loop(frame)
    variables = variables_of(frame)
    return [
        name
        for name, mark in now.marks.items()
        if name in first.marks
        and name in begun.marks
        and not kept & {mark, mark_of(name), now.sizes[name].get(mark)}
        and (
            _has_grown(name, first, begun, now)
            if mark == begun.marks[name]
            else loop.carries(name) and not _is_time(variables[name], begun.clocks)
        )
    ]


def _has_grown(name: str, first: Variables, begun: Variables, now: Variables) -> bool:
    """Whether a container has grown again: one that is filled anew in each epoch has not."""
    if first is begun or first.marks[name] != now.marks[name]:
        return False
    before = begun.sizes[name]
    return any(
        key in before and before[key][0] < length and before[key][1] in (None, head)
        for key, (length, head) in now.sizes[name].items()
    )


def marks_in(things: Collection[Any]) -> set[Any]:
    """Return what tells `things` and copies of them, and the names that they have in dicts."""
    marks = {mark for thing in things if (mark := mark_of(thing))}
    return marks | {size for thing in things for _, size in _sizes(thing) if size[0]}


def mark_of(value: Any) -> Any:
    """Return something that tells plain data from other plain data; None for any other object."""
    kind = type(value)
    if kind in _NUMBERS or issubclass(kind, np.generic):
        return f"{value}"
    if kind in (str, bytes):
        return "text", hash(value)
    is_scalar = kind in _TENSORS and value.ndim == 0
    return id(value) if is_scalar or (kind in _CONTAINERS and _is_plain(value, _DEPTH)) else None


def _is_plain(value: Any, depth: int) -> bool:
    kind = type(value)
    if kind not in _CONTAINERS:
        return kind in (*_NUMBERS, *_TENSORS, str, bytes) or issubclass(kind, np.generic)
    return depth > 0 and all(_is_plain(item, depth - 1) for item in _some(value))


def _some(container: Any) -> Iterator[Any]:
    return islice(container.values() if type(container) in _DICTS else container, _MANY)


def _sizes(value: Any) -> Iterator[tuple[int, Any]]:
    """Yield the length and the first item of a container, and of those in it, by `id`."""
    if type(value) in _CONTAINERS:
        yield id(value), (len(value), mark_of(next(iter(value), None)) if value else None)
        for item in _some(value):
            yield from _sizes(item)


def _is_time(value: Any, began: list[float]) -> bool:
    return type(value) in (int, float) and any(
        before <= value <= clock() for before, clock in zip(began, _CLOCKS, strict=True)
    )
