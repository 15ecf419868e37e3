"""Finds the part of an object that can't be pickled, to name it in the error message."""

from __future__ import annotations

import functools
import inspect
import io
import os
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pickle import PickleBuffer
from typing import Any

from optuna_fleet.wire.packing import Pickler, is_tensor

_MOST_PARTS = 50_000
_LONGEST_PATH = 1000
_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray, PickleBuffer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of an object, as the user's code has it.

    Attributes:
        name: The variable by which it is reached.
        path: The expression for it, which begins with that variable.
        origin: What the variable is, and who uses it.
    """

    value: Any
    name: str
    path: str
    origin: str
    whole: Any

    def inner(self, step: str, value: Any) -> Part:
        """A part of this part; `step` leads to it."""
        return replace(self, value=value, path=self.path + step)

    def __str__(self) -> str:
        """In words."""
        head = f"`{self.name}`, {self.origin}, is of type `{_type(self.whole)}`"
        if self.value is self.whole:
            return head
        inner = f"`{self.path}`" if self.path != self.name else "something"
        return f"{head}, and {inner} in it is of type `{_type(self.value)}`"


def explained(wholes: list[Part], error: Exception, pickler: Pickler | None = None) -> str:
    """What in `wholes` can't be pickled by this pickler, and why, in a sentence.

    What pickling them raised is all there is to tell if nothing is found.
    """
    found = None
    with suppress(Exception):
        found = first_unpicklable(wholes, pickler)
    what, why = found or ("something in it", error)
    which = ", which" if found else ""
    return f"{what}{which} can't be pickled ({type(why).__name__}: {why})."


def variable(name: str, value: Any, origin: str) -> Part:
    """Return a part that is the value of a variable."""
    return Part(value=value, name=name, path=name, origin=origin, whole=value)


def first_unpicklable(
    wholes: list[Part], pickler: Pickler | None = None
) -> tuple[Part, Exception] | None:
    """The part nearest to one of `wholes` that can't be pickled, and why, if it can be found."""
    pickler = pickler or Pickler(io.BytesIO())
    waiting = deque(wholes)
    met: dict[int, Any] = {}
    while waiting and len(met) < _MOST_PARTS:
        part = waiting.popleft()
        if id(part.value) in met or len(part.path) > _LONGEST_PATH:
            continue
        met[id(part.value)] = part.value  # kept, or another object could get its id
        try:
            inner = (each for each in _parts(part, pickler) if not _is_plain(each.value))
            waiting.extend(islice(inner, _MOST_PARTS))
        except Exception as error:
            return part, error
    return None


def _is_plain(value: Any) -> bool:
    """Whether all of it can be pickled."""
    return type(value) in _PLAIN or is_tensor(value)  # whose bytes would be copied


def _parts(part: Part, pickler: Any) -> Iterable[Part]:
    """What pickle would look at next.

    Raises:
        Exception: The part can't be pickled, whatever is in it.
    """
    value = part.value
    if getattr(pickler, "persistent_id", lambda _: None)(value) is not None:
        return []
    if type(value) in (list, tuple, set, frozenset, dict):
        return _items(part, value)
    if type(value) is functools.partial:
        names = ("func", "args", "keywords")
        return [part.inner(f".{name}", getattr(value, name)) for name in names]
    if type(value) is types.MethodType:
        origin = f"the object of the method {_where(value.__func__)}"
        return [variable("self", value.__self__, origin), part.inner("", value.__func__)]
    reduction = _reduction(value, pickler)
    if isinstance(reduction, str):
        return []
    if isinstance(value, types.FunctionType):
        return _of_function(part, value, reduction)
    if isinstance(value, type):
        part = variable(value.__qualname__, value, f"a class of {value.__module__}")
    return _of_reduction(part, *reduction[:5])


def _reduction(value: Any, pickler: Any) -> Any:
    """What pickle would make of a value: a tuple of parts, or a name that leads to it."""
    found = pickler.reducer_override(value)
    if found is not NotImplemented:
        return found
    if reducer := pickler.dispatch_table.get(type(value)):
        return reducer(value)
    is_named = isinstance(value, (type, types.FunctionType))
    found = "" if is_named else value.__reduce_ex__(5)
    if isinstance(found, str):
        Pickler(io.BytesIO()).dump(value)  # which looks whether the name leads to it
    return found


def _items(part: Part, value: Any) -> Iterator[Part]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield part.inner("", key)
            yield part.inner(f"[{key!r:.40}]", item)
    else:
        for number, item in enumerate(value):
            yield part.inner("" if isinstance(value, (set, frozenset)) else f"[{number}]", item)


def _of_reduction(
    part: Part, factory: Any, args: Any, state: Any = None, items: Any = None, pairs: Any = None
) -> Iterator[Part]:
    for attributes in state if type(state) is tuple else (state,):
        if isinstance(attributes, Mapping):
            for name, value in attributes.items():
                yield part.inner(f".{name}", value)
        else:
            yield part.inner("", attributes)
    yield from _items(part, list(items or ()))
    yield from _items(part, dict(pairs or ()))
    for value in (factory, *args):
        yield part.inner("", value)


def _of_function(part: Part, function: types.FunctionType, reduction: Any) -> Iterator[Part]:
    code, where = function.__code__, _where(function)
    file = os.path.basename(code.co_filename)
    attributes, slots = reduction[2]
    is_wrapper = function.__module__ != function.__globals__.get("__name__")  # a library's
    for name, value in slots["__globals__"].items():
        origin = f"a global variable of {file} that {where} uses"
        yield part.inner("", value) if is_wrapper else variable(name, value, origin)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # it has no value yet
            origin = f"a variable of the function around {where}"
            yield variable(name, cell.cell_contents, origin)
    named = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    by_name = dict(zip(named[len(named) - len(defaults) :], defaults, strict=True))
    for name, value in {**by_name, **(function.__kwdefaults__ or {})}.items():
        yield variable(name, value, f"the default of an argument of {where}")
    for name, value in {**function.__annotations__, **attributes}.items():
        yield part.inner(f".{name}", value)


def _where(function: Any) -> str:
    code = inspect.unwrap(function).__code__
    return (
        f"{function.__qualname__}() ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"
    )


def _type(value: Any) -> str:
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
