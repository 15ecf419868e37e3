"""Names the part of an object that can't be pickled, for the error message."""

from __future__ import annotations

import functools
import inspect
import io
import os
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from optuna_fleet.wire.packing import Pickler, is_tensor, pack

_DEEPEST = 20


class _Part(NamedTuple):
    """A part of an object: the expression for it, and where the user's code has it."""

    path: str
    origin: str
    value: Any


def explained(
    wholes: Mapping[str, Any],
    origin: str,
    error: Exception,
    dumps: Callable[[Any], Any] = pack,
) -> str:
    """What in `wholes`, by their names, can't be pickled by `dumps`, and why, in a sentence."""

    def fails(part: _Part) -> bool:
        if is_tensor(part.value):  # whose bytes would be copied
            return False
        try:
            dumps(part.value)
        except Exception:
            return True
        return False

    inner = [_Part(name, origin, whole) for name, whole in wholes.items()]
    what, met = "Something in it", list[Any]()
    for _ in range(_DEEPEST):
        new = (part for part in inner if not any(part.value is each for each in met))
        if (part := next(filter(fails, new), None)) is None:
            break
        kind = type(part.value)
        named = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
        what = f"`{part.path}`, {part.origin}, is of type `{named}`; it"
        met.append(part.value)
        inner = []
        with suppress(Exception):  # of the user's own methods
            inner = list(_parts(part))
    return f"{what} can't be pickled ({type(error).__name__}: {error})."


def _parts(part: _Part) -> Iterator[_Part]:
    """What pickle takes along with a part."""
    path, origin, value = part
    if isinstance(value, dict):
        yield from (_Part(f"{path}[{key!r:.40}]", origin, item) for key, item in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from (_Part(f"{path}[{n}]", origin, item) for n, item in enumerate(value))
    elif isinstance(value, functools.partial):
        for name in ("func", "args", "keywords"):
            yield _Part(f"{path}.{name}", origin, getattr(value, name))
    elif isinstance(value, types.MethodType):
        yield _Part("self", f"the object of the method {value.__qualname__}", value.__self__)
        yield _Part(path, origin, value.__func__)
    elif isinstance(value, types.FunctionType):
        yield from _of_function(value)
    else:
        yield from _of_instance(part)


def _of_function(function: types.FunctionType) -> Iterator[_Part]:
    code = function.__code__
    where = (
        f"{function.__qualname__}() ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"
    )
    reduction: Any = Pickler(io.BytesIO()).reducer_override(function)
    attributes, slots = reduction[2]
    names = {**slots["__globals__"], **inspect.getclosurevars(function).nonlocals}
    arguments = inspect.signature(function).parameters.values()
    defaults = {each.name: each.default for each in arguments}
    for name, value in {**names, **defaults, **attributes}.items():
        yield _Part(name, f"which {where} uses", value)


def _of_instance(part: _Part) -> Iterator[_Part]:
    if isinstance(part.value, type):
        path, state = part.value.__qualname__, dict(vars(part.value))
    else:
        path, state = part.path, part.value.__reduce_ex__(4)[2]
    for attributes in state if isinstance(state, tuple) else (state,):
        for name, item in (attributes or {}).items():
            if name not in ("__dict__", "__weakref__"):
                yield _Part(f"{path}.{name}", part.origin, item)
    yield _Part(path, part.origin, type(part.value))
