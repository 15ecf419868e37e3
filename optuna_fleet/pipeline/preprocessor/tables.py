"""Long lists of file names and labels as arrays, which all preprocessors share.

As Python objects the 1.3 million pairs of ImageNet take 240 MB in each process, forked or not: to
read one is to write its reference count.
"""

from __future__ import annotations

import marshal
from collections.abc import Sequence
from typing import Any

import numpy as np

from optuna_fleet.pipeline.preprocessor.transform_split import is_torchvisions

LEAST_ITEMS = 1000
"""Shorter lists stay lists."""


def reduction(dataset: Any, known: dict[int, Any]) -> Any:
    """Returns how pickle is to put together a data set of torchvision's, with tables for lists.

    Only for these, as their code is known to do no more with such a list than to index it; None
    for any other object. ``known`` has the tables of lists met before, with these, by their ids.
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
        known[id(value)] = value, Table(value) if all(map(_is_plain, value)) else value
    return known[id(value)][1]


def _is_plain(item: Any) -> bool:
    parts = item if type(item) is tuple else (item,)
    return all(type(part) in (int, str) for part in parts)


class Table(Sequence[Any]):
    """Gives what a list of integers, strings and tuples of these gives; it can't be changed."""

    def __init__(self, items: Sequence[Any]) -> None:
        records = [marshal.dumps(item) for item in items]
        self._ends = np.cumsum([0, *map(len, records)], dtype=np.int64)
        self._records = np.frombuffer(b"".join(records), dtype=np.uint8)

    def __len__(self) -> int:
        """Number of items."""
        return len(self._ends) - 1

    def __getitem__(self, index: Any) -> Any:
        """Returns an item, or a list of those of a slice."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]  # its errors are those of a list
        return marshal.loads(self._records[self._ends[number] : self._ends[number + 1]].data)
