"""Whether the attributes of a transform's steps are still what they were.

``self.flip.p = ...`` in ``__getitem__`` makes a step depend on the sample, which what is stored of
a sample can't tell later.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from optuna_fleet.pipeline.preprocessor.generators import is_generator

_MOST_ITEMS = 256
"""Longer lists and dicts are data, not parameters: these are not looked into."""

_MOST_CONTAINERS = 256
"""Of so many the attributes are compared: that takes some microseconds."""

Attribute = tuple[int, Any]
"""One of those compared: number of the dict and its key, or number of the list and None."""


class Attributes:
    """The attributes of some objects, and of the objects in them, as they are now.

    Args:
        steps: Any objects. Of functions and bound methods, what they are bound to.
        restless: Those of them that the steps change themselves.

    Attributes:
        restless: Likewise.
    """

    def __init__(self, steps: Iterable[Any], restless: Iterable[Attribute] = ()) -> None:
        self._containers: list[tuple[Any, Any]] = []  # as it is, and a copy
        self._tensors: list[tuple[Any, int]] = []
        self._arrays: list[tuple[Any, bytes]] = []
        self._seen: dict[int, Any] = {}  # kept, or another object may get its number
        for step in steps:
            self._note(step)
        self.restless = frozenset(restless)
        self._ignore()

    def hold(self) -> bool:
        """Returns whether none of them has changed."""
        try:
            return (
                all(live == copy for live, copy in self._containers)
                and all(tensor._version == version for tensor, version in self._tensors)
                and all(array.tobytes() == content for array, content in self._arrays)
            )
        except Exception:  # arrays have no equality
            return False

    def now(self) -> list[Any]:
        """Returns them as they are now, for `ignore_changed`."""
        return [live.copy() for live, _ in self._containers]

    def ignore_changed(self, before: list[Any]) -> None:
        """From now on those may change that have changed since then."""
        for number, (old, (live, _)) in enumerate(zip(before, self._containers, strict=True)):
            if isinstance(old, list):
                keys = [] if old == live else [None]
            else:
                keys = [key for key in {**old, **live} if not _same_item(live, old, key)]
            self.restless |= {(number, key) for key in keys}
        self._ignore()

    def _ignore(self) -> None:
        for number, key in self.restless:
            live, copy = self._containers[number]
            if isinstance(copy, list):
                self._containers[number] = [], []
            elif not isinstance(copy, _Partly):
                self._containers[number] = live, _Partly(copy, key)
            else:
                copy.leave_out(key)

    def include(self, value: Any) -> bool:
        """Returns whether an object is among those that were looked into."""
        return id(value) in self._seen

    def _note(self, value: Any) -> None:
        if id(value) in self._seen or len(self._containers) >= _MOST_CONTAINERS:
            return
        self._seen[id(value)] = value
        for part in self._parts(value):
            self._note(part)

    def _parts(self, value: Any) -> Iterable[Any]:
        torch = sys.modules.get("torch")
        if isinstance(value, (type, ModuleType)) or is_generator(value):
            return ()
        if isinstance(value, (dict, list)):
            return self._items(value)
        if torch is not None and isinstance(value, torch.nn.Module):
            self._items(vars(value))
            # It has a dozen empty dicts for hooks.
            return [item for key, item in vars(value).items() if _is_full(item) or key[0] != "_"]
        if torch is not None and isinstance(value, torch.Tensor):
            self._tensors.append((value, value._version))
            return ()
        if isinstance(value, np.ndarray):
            if value.size <= _MOST_ITEMS:
                self._arrays.append((value, value.tobytes()))
            return ()
        return _bound(value)

    def _items(self, value: Any) -> Iterable[Any]:
        if len(value) > _MOST_ITEMS:
            return ()
        self._containers.append((value, value.copy()))
        return list(value if isinstance(value, list) else value.values())


def _bound(value: Any) -> Iterable[Any]:
    """What a function or any other object has in it."""
    if isinstance(value, tuple):
        return value
    if isinstance(value, FunctionType):
        return [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
    if isinstance(value, MethodType):
        return (value.__self__,)
    if isinstance(value, partial):
        return value.func, value.args, value.keywords
    return [vars(value)] if hasattr(value, "__dict__") else _slots(value)


class _Partly:
    """Equals any dict that has these items, but for some of them."""

    def __init__(self, items: dict[Any, Any], but: Any) -> None:
        self._items = items
        self.leave_out(but)

    def leave_out(self, key: Any) -> None:
        self._items.pop(key, None)

    def __eq__(self, live: object) -> bool:
        return all(_same_item(live, self._items, key) for key in self._items)

    __hash__ = None  # type: ignore[assignment]


def _same_item(live: Any, copy: Any, key: Any) -> bool:
    missing = object()
    found, before = live.get(key, missing), copy.get(key, missing)
    return found is before or bool(found == before)


def _is_full(value: Any) -> bool:
    return not isinstance(value, dict) or bool(value)


def _slots(value: Any) -> Iterable[Any]:
    names = getattr(type(value), "__slots__", ())
    names = (names,) if isinstance(names, str) else names
    return [getattr(value, name) for name in names if hasattr(value, name)]


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
