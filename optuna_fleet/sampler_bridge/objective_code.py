"""Digests of an objective, by which another process knows whether it has changed.

What its code says is told apart from the values that it uses: these may be others in each process
(the time, a temporary folder, a list made of a set), and nobody has changed anything.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_MOST = 100  # items of one container, which may be a data set
_MOST_CHARACTERS = 10_000  # of one text, likewise


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
    codes: set[str] = set()  # values may change the order
    values: list[str] = []
    met: dict[int, Any] = {}  # kept, or another object could get its id
    module, todo = _module_of(objective), [objective]
    try:
        while todo:
            value = todo.pop()
            if isinstance(value, _PLAIN):
                short = value[:_MOST_CHARACTERS] if isinstance(value, (str, bytes)) else value
                values.append(repr(short))
            elif isinstance(value, types.CodeType):
                codes.add(_text_of(value))
            elif id(value) not in met:
                met[id(value)] = value
                values.append(type(value).__qualname__)
                todo += reversed(list(_parts_of(value, module)))
    except Exception:  # whatever the user's objects do when they are looked at
        return ObjectiveDigest()
    code = _hash_of(sorted(codes))
    return ObjectiveDigest(code, _hash_of([code, *values]))


def _module_of(objective: Any) -> str:
    while isinstance(objective, functools.partial):
        objective = objective.func
    return str(getattr(objective, "__module__", ""))


def _parts_of(value: Any, module: str) -> Iterable[Any]:
    """What a value consists of, or names, in an order that depends on the code alone."""
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, types.MethodType | staticmethod | classmethod):
        return value.__func__, getattr(value, "__self__", None)
    if isinstance(value, property):
        return value.fget, value.fset
    if isinstance(value, tuple | list):
        return value[:_MOST]
    if isinstance(value, set | frozenset):
        return sorted(repr(one) for one in value if isinstance(one, _PLAIN))[:_MOST]
    if isinstance(value, dict):
        return list(value.items())[:_MOST]
    if isinstance(value, types.FunctionType | type):
        return value.__qualname__, *(_inside(value) if value.__module__ == module else ())
    # An object that can be called, or one that the code uses.
    return type(value), vars(value) if type(value).__module__ == module else None


def _inside(value: Any) -> Iterator[Any]:
    """What the code of a function or class consists of, and what it names of its module."""
    if isinstance(value, type):
        yield value.__bases__
        for name, attribute in vars(value).items():
            if not name.startswith("__") or isinstance(attribute, types.FunctionType):
                yield from (name, attribute)
        return
    yield from (value.__code__, value.__defaults__, value.__kwdefaults__)
    for cell in value.__closure__ or ():
        yield getattr(cell, "cell_contents", None)  # it may have none yet
    yield from (value.__globals__.get(name) for name in _names(value.__code__))


def _names(code: types.CodeType) -> Iterator[str]:
    """What it names of its module; functions within it have the same globals."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def _text_of(code: types.CodeType) -> str:
    consts = [
        _text_of(value)
        if isinstance(value, types.CodeType)
        else repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)
        for value in code.co_consts
    ]
    return repr((code.co_code, code.co_names, code.co_varnames, code.co_freevars, consts))


def _hash_of(texts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode(errors="replace")).hexdigest()
