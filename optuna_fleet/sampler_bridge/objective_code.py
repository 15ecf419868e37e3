"""A digest of an objective's code, by which another process knows whether it has changed."""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_SHARED_AT_WILL = (tuple, frozenset, types.CodeType)  # by the compiler, if they are equal
_MOST_ITEMS = 100  # of one container: it may be a data set
_SIMPLE: tuple[tuple[Any, Callable[[Any], Iterable[Any]]], ...] = (
    (functools.partial, lambda p: (p.func, p.args, p.keywords)),
    (types.MethodType, lambda m: (m.__func__, m.__self__)),
    ((staticmethod, classmethod), lambda m: (m.__func__,)),
    (property, lambda p: (p.fget, p.fset)),
    (
        types.CodeType,
        lambda c: (c.co_code, c.co_names, c.co_varnames, c.co_freevars, c.co_consts),
    ),
    ((tuple, list), lambda items: items[:_MOST_ITEMS]),
    ((set, frozenset), lambda items: sorted(repr(i) for i in items if isinstance(i, _PLAIN))),
    (dict, lambda d: list(d.items())[:_MOST_ITEMS]),
)


def code_digest(objective: Any) -> str:
    """Return what is the same for the same code, in any process of the same Python; "" if unknown.

    It follows functions and classes of the objective's module, the numbers and strings that they
    name, and what it was bound to. Comments and places in the file do not count, nor does what is
    imported.
    """
    walk = _Walk()
    try:
        walk.add(objective)
    except Exception:  # whatever the user's objects do when they are looked at
        return ""
    return walk.digest()


class _Walk:
    """Comes by the parts of an objective in an order that depends on its code alone."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._met: dict[int, Any] = {}  # kept, or another object could get its id
        self._module: str | None = None

    def digest(self) -> str:
        return self._hash.hexdigest()

    def add(self, value: Any) -> None:
        self._note(type(value).__qualname__)
        if isinstance(value, _PLAIN):
            self._note(repr(value))
            return
        if not isinstance(value, _SHARED_AT_WILL):
            if id(value) in self._met:
                return
            self._met[id(value)] = value
        for part in self._parts(value):
            self.add(part)

    def _note(self, text: str) -> None:
        self._hash.update(text.encode(errors="replace") + b"\0")

    def _parts(self, value: Any) -> Iterable[Any]:
        for kinds, parts in _SIMPLE:
            if isinstance(value, kinds):
                return parts(value)
        if isinstance(value, (types.FunctionType, type)):
            inner = _inside(value) if self._is_own(value) else ()
            return (value.__qualname__, *inner)
        # An object that can be called, or one that the code uses.
        return (type(value), vars(value) if self._is_own(type(value)) else None)

    def _is_own(self, value: Any) -> bool:
        """Whether it is of the objective's module, which is that of the first one met."""
        self._module = self._module or value.__module__
        return bool(value.__module__ == self._module)


def _inside(value: Any) -> Iterator[Any]:
    """What the code of a function or class consists of, and what it names."""
    if isinstance(value, type):
        yield value.__bases__
        for name, attribute in vars(value).items():
            if not name.startswith("__") or isinstance(attribute, types.FunctionType):
                yield from (name, attribute)
        return
    yield from (value.__code__, value.__defaults__, value.__kwdefaults__)
    for cell in value.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # it has no value yet
            yield None
    yield from (value.__globals__.get(name) for name in _names(value.__code__))


def _names(code: types.CodeType) -> Iterator[str]:
    """What it may name of its module; functions within it have the same globals."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)
