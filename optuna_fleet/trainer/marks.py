"""Marks tell the values of variables apart, whichever process they are of."""

from __future__ import annotations

import contextlib
import time
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from types import NoneType
from typing import Any

import numpy as np
import torch

_SCALARS = frozenset((bool, int, float, complex, NoneType, str, bytes))
_TENSORS = (torch.Tensor, torch.nn.Parameter, np.ndarray)
_DICTS = (dict, defaultdict, OrderedDict, Counter)
_CONTAINERS = (*_DICTS, list, tuple, deque, set, frozenset)
_CLOCKS = (
    *((clock, 1) for clock in (time.time, time.perf_counter, time.monotonic)),
    *((clock, 10**9) for clock in (time.time_ns, time.perf_counter_ns, time.monotonic_ns)),
)
_DEPTH = 2
_MOST_ELEMENTS = 64
_MOST_ITEMS = 1000


class Marks:
    """Of plain data, and of what has a `state_dict`. Nothing of it is kept alive.

    Args:
        known: What is told apart by nobody, by `id`.
        age_s: Variables that are readings of clocks, and not older, have no marks.
    """

    def __init__(self, known: Collection[int], age_s: float) -> None:
        self._known = known
        readings = [(clock(), per_s) for clock, per_s in _CLOCKS]
        self._readings = [(type(now), now - age_s * per_s, now) for now, per_s in readings]

    def of(self, value: Any, depth: int = _DEPTH) -> str:
        """Return the mark of a value; "" if it has none, or can't be looked at.

        That of a container or tensor is made of some of its items, from all over it.
        """
        with contextlib.suppress(Exception):
            return self._of(value, depth)
        return ""

    def _of(self, value: Any, depth: int) -> str:
        kind = type(value)
        if is_scalar(kind):
            is_reading = depth == _DEPTH and kind in (int, float) and self._is_reading(value)
            return "" if is_reading else _short(f"{value!r}")
        if id(value) in self._known or issubclass(kind, torch.optim.Optimizer):  # see `Steps`
            return ""
        if kind in _TENSORS:
            return _of_tensor(value)
        if kind in _CONTAINERS:
            name = "dict" if kind in _DICTS else kind.__name__
            return f"{name} {len(value)} {_short(f'{self._items(value, depth)}')}"
        if has(kind, "state_dict") and not has(kind, "reset"):  # as metrics have: in each epoch
            is_module = issubclass(kind, torch.nn.Module)
            return f"{'module' if is_module else 'object'} {self.of(value.state_dict(), depth)}"
        return ""

    def inside(self, values: Mapping[Any, Any], depth: int = 2) -> Iterator[Any]:
        """Yield marks of what is in dicts: with its name, and alone if it is no scalar."""
        for name, value in islice(values.items(), _MOST_ITEMS):
            mark = self.of(value)
            yield name, mark
            if not is_scalar(type(value)):
                yield mark
            if depth and type(value) in _DICTS:
                yield from self.inside(value, depth - 1)

    def _items(self, container: Any, depth: int) -> list[Any]:
        most = 4**depth if depth else 0
        if type(container) in (set, frozenset):  # whose order is another one in other processes
            return sorted(self.of(item, 0) for item in container) if len(container) < most else []
        pairs = container.items() if type(container) in _DICTS else enumerate(container)
        every = len(container) // (most or 1) + 1
        some = islice(pairs, 0, None, every) if most else ()
        return [(self.of(key, 0), self.of(item, depth - 1)) for key, item in some]

    def _is_reading(self, value: Any) -> bool:
        kind = type(value)
        return any(
            kind is a_clocks and low <= value <= now for a_clocks, low, now in self._readings
        )


def is_scalar(kind: type) -> bool:
    """Whether it is a number, None or a string: what is the same need not be one object."""
    return kind in _SCALARS or issubclass(kind, np.generic)


def has(kind: type, name: str) -> bool:
    """Whether a class has that attribute; none of its code is run."""
    return any(name in vars(base) for base in kind.__mro__)


def _of_tensor(tensor: Any) -> str:
    if isinstance(tensor, torch.Tensor):
        tensor = tensor.detach()
    flat = tensor.reshape(-1)
    # No sum: that would round otherwise on another device.
    some = flat[:: len(flat) // _MOST_ELEMENTS + 1].tolist()
    return f"tensor {tuple(tensor.shape)} {_short(f'{some}')}"


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{zlib.crc32(text.encode()):08x}"
