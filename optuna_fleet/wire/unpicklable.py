"""Names the part of an object that can't be pickled, for the error message."""

from __future__ import annotations

import functools
import inspect
import io
import os
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from optuna_fleet.wire.packing import Pickler, is_tensor, pack

_DEEPEST = 20


def explained(
    wholes: Mapping[str, Any],
    origin: str,
    error: Exception,
    dumps: Callable[[Any], Any] = pack,
) -> str:
    """What in `wholes`, by their names, can't be pickled by `dumps`, and why, in a sentence."""

    def fails(value: Any) -> bool:
        if is_tensor(value):  # whose bytes would be copied
            return False
        try:
            dumps(value)
        except Exception:
            return True
        return False

    what, met = "Something in it", list[Any]()
    parts = [(name, origin, whole) for name, whole in wholes.items()]
    for _ in range(_DEEPEST):
        new = (part for part in parts if not any(part[2] is each for each in met))
        if (part := next((part for part in new if fails(part[2])), None)) is None:
            break
        path, origin, value = part
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        what = f"`{path}`, {origin}, is of type `{kind}`; it"
        met.append(value)
        parts = []
        with suppress(Exception):  # of the user's own methods
            parts = list(_parts(path, origin, value))
    return f"{what} can't be pickled ({type(error).__name__}: {error})."


def _parts(path: str, origin: str, value: Any) -> Iterator[tuple[str, str, Any]]:
    """What pickle takes along with an object: the expression for it, where it is from, itself."""
    match value:
        case dict():
            yield from ((f"{path}[{key!r:.40}]", origin, item) for key, item in value.items())
        case list() | tuple() | set() | frozenset():
            yield from ((f"{path}[{n}]", origin, item) for n, item in enumerate(value))
        case functools.partial():
            for name in ("func", "args", "keywords"):
                yield f"{path}.{name}", origin, getattr(value, name)
        case types.MethodType():
            yield "self", f"the object of the method {value.__qualname__}", value.__self__
            yield path, origin, value.__func__
        case types.FunctionType():
            where = os.path.basename(value.__code__.co_filename)
            using = f"{value.__qualname__}() ({where}:{value.__code__.co_firstlineno})"
            for name, item in _used_by(value).items():
                yield name, f"which {using} uses", item
        case _:
            yield from _of_instance(path, origin, value)


def _of_instance(path: str, origin: str, value: Any) -> Iterator[tuple[str, str, Any]]:
    is_class = isinstance(value, type)
    state = vars(value) if is_class else value.__reduce_ex__(4)[2]
    path = value.__qualname__ if is_class else path
    for attributes in state if isinstance(state, tuple) else (state,):
        for name, item in (attributes or {}).items():
            if name not in ("__dict__", "__weakref__"):
                yield f"{path}.{name}", origin, item
    yield path, origin, type(value)


def _used_by(function: types.FunctionType) -> dict[str, Any]:
    reduction: Any = Pickler(io.BytesIO()).reducer_override(function)
    attributes, slots = reduction[2]
    arguments = inspect.signature(function).parameters.values()
    defaults = {each.name: each.default for each in arguments}
    closure = inspect.getclosurevars(function).nonlocals
    return {**slots["__globals__"], **closure, **defaults, **attributes}
