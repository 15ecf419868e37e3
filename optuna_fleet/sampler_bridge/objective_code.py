"""Digests of an objective, by which another process knows whether it has changed.

What its code says is told apart from the values that it uses: these may be others in each process
(the time, a temporary folder, a list made of a set), and nobody has changed anything.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_SHARED_AT_WILL = (tuple, frozenset, types.CodeType)  # by the compiler, if they are equal
_MOST_ITEMS = 100  # of one container: it may be a data set
_MOST_CHARACTERS = 10_000  # of one text, likewise
_SIMPLE: tuple[tuple[Any, Callable[[Any], Iterable[Any]]], ...] = (
    (functools.partial, lambda p: (p.func, p.args, p.keywords)),
    (types.MethodType, lambda m: (m.__func__, m.__self__)),
    ((staticmethod, classmethod), lambda m: (m.__func__,)),
    (property, lambda p: (p.fget, p.fset)),
    ((tuple, list), lambda items: items[:_MOST_ITEMS]),
    ((set, frozenset), lambda items: sorted(repr(i) for i in items if isinstance(i, _PLAIN))),
    (dict, lambda d: list(d.items())[:_MOST_ITEMS]),
)


@dataclass(frozen=True, slots=True)
class ObjectiveDigest:
    """What is the same for the same objective in any process of the same Python; "" if unknown.

    Attributes:
        code: Of its code, and of that of functions and classes of its module. Comments and places
            in the file do not count, nor does what is imported.
        whole: Of the numbers and strings too that these name, and of what it was bound to.
    """

    code: str = ""
    whole: str = ""


def digest_of(objective: Any) -> ObjectiveDigest:
    """Look at an objective, and at what it uses."""
    walk = _Walk()
    try:
        walk.add(objective)
    except Exception:  # whatever the user's objects do when they are looked at
        return ObjectiveDigest()
    return walk.digest()


class _Walk:
    """Comes by the parts of an objective in an order that depends on its code alone."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._codes: set[str] = set()  # values may change the order
        self._met: dict[int, Any] = {}  # kept, or another object could get its id
        self._module: str | None = None

    def digest(self) -> ObjectiveDigest:
        codes = hashlib.sha256("\0".join(sorted(self._codes)).encode(errors="replace"))
        return ObjectiveDigest(codes.hexdigest(), self._hash.hexdigest())

    def add(self, value: Any) -> None:
        self._note(type(value).__qualname__)
        if isinstance(value, _PLAIN):
            short = value[:_MOST_CHARACTERS] if isinstance(value, (str, bytes)) else value
            self._note(repr(short))
            return
        if isinstance(value, types.CodeType):
            self._codes.add(text := _text_of(value))
            self._note(text)
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


def _text_of(code: types.CodeType) -> str:
    consts = [
        _text_of(value)
        if isinstance(value, types.CodeType)
        else repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)
        for value in code.co_consts
    ]
    return repr((code.co_code, code.co_names, code.co_varnames, code.co_freevars, consts))


def _names(code: types.CodeType) -> Iterator[str]:
    """What it names of its module; functions within it have the same globals."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)
