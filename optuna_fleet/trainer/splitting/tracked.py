"""Numbers that depend on the batch, as ``x.shape[0]``, which know what its parts would give.

They are `int` and `float` to all code; what is computed of them knows it too.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "floordiv")
}


class Tracked:
    """A number of the whole batch, and what it is in each world (see `worlds`)."""

    in_worlds: tuple[Any, ...]

    def __reduce__(self) -> Any:
        number: Any = self
        return (int if isinstance(number, int) else float), (plain(number),)


escaped: dict[float, tuple[Any, ...]] = {}
"""What Python was given a plain number of, by ``float(n)`` say; in worlds, by its value."""


class TrackedInt(Tracked, int):
    """As an `int`."""


class TrackedFloat(Tracked, float):
    """As a `float`."""


def _converts(kind: type) -> Any:
    def convert(self: Any) -> Any:
        number = plain(self)
        escaped[number] = self.in_worlds
        return kind(number)

    return convert


def tracked(number: Any, in_worlds: tuple[Any, ...]) -> Any:
    """`number` itself, if it is the same in all worlds, or no number."""
    if type(number) not in (int, float) or len(set(in_worlds)) == 1:
        return number
    result: Any = TrackedInt(number) if type(number) is int else TrackedFloat(number)
    result.in_worlds = in_worlds
    return result


def plain(value: Any) -> Any:
    """The number without what it is in the worlds; any other value itself."""
    if not isinstance(value, Tracked):
        return value
    number: Any = value
    return int.__int__(number) if isinstance(value, int) else float.__float__(number)


def in_world(value: Any, world: int) -> Any:
    """What a number is in a world; any other value itself."""
    return value.in_worlds[world] if isinstance(value, Tracked) else value


def _defined(function: Callable[[Any, Any], Any]) -> Any:
    def apply(self: Any, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        result = function(plain(self), plain(other))
        return tracked(result, tuple(_tried(function, self, other, i) for i in range(3)))

    return apply


def _tried(function: Callable[[Any, Any], Any], one: Any, other: Any, world: int) -> Any:
    try:
        return function(in_world(one, world), in_world(other, world))
    except ArithmeticError:  # a part may have nothing that counts: of no concern to the objective
        return float("nan")


def _swapped(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda one, other: function(other, one)


for _name, _function in _OPERATORS.items():
    for _kind in (TrackedInt, TrackedFloat):
        setattr(_kind, f"__{_name}__", _defined(_function))
        setattr(_kind, f"__r{_name}__", _defined(_swapped(_function)))

for _kind in (TrackedInt, TrackedFloat):
    for _name, _type in (("__float__", float), ("__int__", int)):
        setattr(_kind, _name, _converts(_type))
