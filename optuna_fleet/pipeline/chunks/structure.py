"""The shape of a nested sample: taken apart into leaves, and put together again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Structure:
    """One node of the nest.

    Attributes:
        type: A tuple, a list, a dict or a namedtuple; None for a leaf, which is anything else.
        children: The nodes below it.
        keys: Keys of a dict, in its order.
    """

    type: type[Any] | None = None
    children: tuple[Structure, ...] = ()
    keys: tuple[Any, ...] = ()


_LEAF = Structure()


def flatten(sample: Any, leaves: list[Any]) -> Structure:
    """Appends the sample's leaves to ``leaves``, depth first, and returns its structure."""
    kind, keys = type(sample), ()
    if kind is dict:
        keys, items = tuple(sample), sample.values()
    elif (
        kind is tuple or kind is list or (isinstance(sample, tuple) and hasattr(sample, "_fields"))
    ):
        items = sample
    else:
        leaves.append(sample)
        return _LEAF
    children = []  # no comprehension, which is one more call for each sample
    for item in items:
        children.append(flatten(item, leaves))
    return Structure(kind, tuple(children), keys)


def rebuild(structure: Structure, leaves: Iterator[Any]) -> Any:
    """Returns the sample with this structure and these leaves."""
    if structure.type is None:
        return next(leaves)
    return _filled(structure, [rebuild(child, leaves) for child in structure.children])


def rebuild_batch(structure: Structure, columns: Iterator[Any]) -> Any:
    """Returns the batch with these columns, nested as ``default_collate`` nests it.

    That is: tuples become lists, and a column of strings (given as a list) becomes a tuple below
    a sequence and stays a list elsewhere.
    """
    if structure.type is None:
        return next(columns)
    parts = [rebuild_batch(child, columns) for child in structure.children]
    if structure.type is not dict:
        parts = [
            tuple(part) if child.type is None and isinstance(part, list) else part
            for child, part in zip(structure.children, parts, strict=True)
        ]
    return parts if structure.type is tuple else _filled(structure, parts)


def _filled(structure: Structure, parts: Sequence[Any]) -> Any:
    kind = structure.type
    assert kind is not None
    if kind is dict:
        return dict(zip(structure.keys, parts, strict=True))
    return kind(parts) if kind is tuple or kind is list else kind(*parts)
