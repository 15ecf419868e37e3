"""The shape of a nested sample: taken apart into leaves, and put together again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["leaf", "tuple", "list", "dict", "namedtuple"]


@dataclass(frozen=True, slots=True)
class Structure:
    """One node of the nest.

    Attributes:
        kind: What the node is; anything that is not a plain container is a leaf.
        children: The nodes below it.
        keys: Keys of a dict, in its order.
        type: Class of a namedtuple.
    """

    kind: Kind
    children: tuple[Structure, ...] = ()
    keys: tuple[Any, ...] = ()
    type: type[Any] | None = None


_LEAF = Structure("leaf")


def flatten(sample: Any, leaves: list[Any]) -> Structure:
    """Appends the sample's leaves to ``leaves``, depth first, and returns its structure."""
    kind = type(sample)
    if kind is tuple or kind is list:
        children = tuple(flatten(item, leaves) for item in sample)
        return Structure("tuple" if kind is tuple else "list", children)
    if kind is dict:
        children = tuple(flatten(item, leaves) for item in sample.values())
        return Structure("dict", children, tuple(sample))
    if isinstance(sample, tuple) and hasattr(sample, "_fields"):
        children = tuple(flatten(item, leaves) for item in sample)
        return Structure("namedtuple", children, (), kind)
    leaves.append(sample)
    return _LEAF


def rebuild(structure: Structure, leaves: Iterator[Any]) -> Any:
    """Returns the sample with this structure and these leaves."""
    match structure.kind:
        case "leaf":
            return next(leaves)
        case "dict":
            return {
                key: rebuild(child, leaves)
                for key, child in zip(structure.keys, structure.children, strict=True)
            }
        case "namedtuple":
            assert structure.type is not None
            return structure.type(*(rebuild(child, leaves) for child in structure.children))
        case "tuple":
            return tuple(rebuild(child, leaves) for child in structure.children)
        case "list":
            return [rebuild(child, leaves) for child in structure.children]


def rebuild_batch(structure: Structure, columns: Iterator[Any]) -> Any:
    """Returns the batch with these columns, nested as ``default_collate`` nests it.

    That is: tuples become lists, and a column of strings (given as a list) becomes a tuple below
    a sequence and stays a list elsewhere.
    """
    match structure.kind:
        case "leaf":
            return next(columns)
        case "dict":
            return {
                key: rebuild_batch(child, columns)
                for key, child in zip(structure.keys, structure.children, strict=True)
            }
        case "namedtuple":
            assert structure.type is not None
            return structure.type(*_below_sequence(structure, columns))
        case "tuple" | "list":
            return list(_below_sequence(structure, columns))


def _below_sequence(structure: Structure, columns: Iterator[Any]) -> Iterator[Any]:
    for child in structure.children:
        part = rebuild_batch(child, columns)
        yield tuple(part) if child.kind == "leaf" and isinstance(part, list) else part


def map_leaves(sample: Any, function: Callable[[Any], Any]) -> Any:
    """Returns the sample with ``function`` applied to every leaf."""
    kind = type(sample)
    if kind is tuple or kind is list:
        return kind([map_leaves(item, function) for item in sample])
    if kind is dict:
        return {key: map_leaves(item, function) for key, item in sample.items()}
    if isinstance(sample, tuple) and hasattr(sample, "_fields"):
        return kind(*[map_leaves(item, function) for item in sample])
    return function(sample)
