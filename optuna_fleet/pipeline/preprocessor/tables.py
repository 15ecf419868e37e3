"""Long lists of file names and labels as arrays, which all preprocessors share.

As Python objects the 1.3 million pairs of ImageNet take 240 MB in each process, forked or not: to
read one is to write its reference count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from optuna_fleet.pipeline.preprocessor.transform_split import is_torchvisions

LEAST_ITEMS = 1000
"""Shorter lists stay lists."""


def reduction(dataset: Any, known: dict[int, Any]) -> Any:
    """Returns how pickle is to put together a data set of torchvision's, with tables for lists.

    Only for these, as their code is known to do no more with such a list than to index it.

    Args:
        dataset: Any object.
        known: Tables of lists met before, with these, by their ids.

    Returns:
        None for any other object.
    """
    if not is_torchvisions(dataset):
        return None
    make, arguments, state, *more = dataset.__reduce_ex__(4)
    if not isinstance(state, dict) or any(more):
        return None
    return make, arguments, {key: _table(value, known) for key, value in state.items()}


def _table(value: Any, known: dict[int, Any]) -> Any:
    if type(value) is not list or len(value) < LEAST_ITEMS:
        return value
    if id(value) not in known:
        known[id(value)] = value, _columns(value)
    columns = known[id(value)][1]
    return value if columns is None else columns


def _columns(items: list[Any]) -> Table | None:
    try:
        if type(items[0]) is not tuple:
            return Table([_column(items)], is_flat=True)
        widths = set(map(len, items))
        is_regular = len(widths) == 1 and set(map(type, items)) == {tuple}
        return Table([_column(each) for each in zip(*items, strict=True)]) if is_regular else None
    except (TypeError, ValueError, OverflowError):
        return None


def _column(values: Sequence[Any]) -> Any:
    (kind,) = set(map(type, values))
    if kind is int:
        return np.array(values, dtype=np.int64)
    if kind is str:
        return Texts(values)
    raise TypeError


class Texts:
    """Many strings in one array of bytes."""

    def __init__(self, texts: Sequence[str]) -> None:
        encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
        self._ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        self._bytes = np.frombuffer(b"".join(encoded), dtype=np.uint8)

    def __getitem__(self, number: int) -> str:
        """Returns a string."""
        begin, end = self._ends[number], self._ends[number + 1]
        return self._bytes[begin:end].tobytes().decode("utf-8", "surrogatepass")


class Table(Sequence[Any]):
    """Gives what a list of tuples, or of single values, gives; it can't be changed.

    Args:
        columns: Arrays of integers, or `Texts`.
        is_flat: There is one column, and an item is a value, not a tuple.
    """

    def __init__(self, columns: list[Any], *, is_flat: bool = False) -> None:
        self._columns = columns
        self._is_flat = is_flat
        first = columns[0]
        self._length = len(first) if isinstance(first, np.ndarray) else len(first._ends) - 1

    def __len__(self) -> int:
        """Number of items."""
        return self._length

    def __getitem__(self, index: Any) -> Any:
        """Returns an item, or a list of those of a slice."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(self._length))]
        number = range(self._length)[index]  # its errors are those of a list
        item = tuple(
            int(column[number]) if isinstance(column, np.ndarray) else column[number]
            for column in self._columns
        )
        return item[0] if self._is_flat else item
