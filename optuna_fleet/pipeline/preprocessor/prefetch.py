"""Data sets that give many samples at once (``__getitems__``), as those of Hugging Face do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from optuna_fleet.pipeline.preprocessor.order import Generator, watched

AT_ONCE = 32
"""Samples that are fetched together: most of the gain, and little memory."""


def gives_many(dataset: Any) -> bool:
    """Returns whether a data set can give many samples at once."""
    data = sys.modules.get("torch.utils.data")  # not loaded: no data set is of these classes
    if data is not None and type(dataset) is data.Subset:
        return gives_many(dataset.dataset)  # it has the method whatever it is a part of
    return callable(getattr(dataset, "__getitems__", None))


def agrees(dataset: Any, length: int, seed: Callable[[int], None]) -> bool:
    """Returns whether many samples at once are what they are one by one, for a few of them.

    The data set is a copy that nobody reads: what it opens stays open.
    """
    from optuna_fleet.pipeline.preprocessor.comparing import same

    indices = sorted({0, length // 3, length // 2, length - 1}, reverse=True)
    try:
        together = dataset.__getitems__(indices)
        alone = []
        for index in indices:
            seed(index)
            alone.append(dataset[index])
        return len(indices) > 1 and same(list(together), alone)
    except Exception:
        return False  # it is told of when that sample is wanted


class Prefetched:
    """Gives what ``dataset[index]`` gives, but fetches many of the samples that will be asked for.

    ``seed`` seeds as for the sample that is asked for. Where random numbers are drawn, of ``own``
    generators or others, a sample would depend on those it is fetched with: then they are fetched
    alone.
    """

    def __init__(
        self, dataset: Any, seed: Callable[[], None], own: Sequence[Generator] = ()
    ) -> None:
        self._dataset = dataset
        self._seed = seed
        self._own = own
        self._expected: list[int] = []
        self._fetched: dict[int, Any] = {}
        self._is_random = False

    def expect(self, indices: Sequence[int]) -> None:
        """Tells which samples will be asked for, in this order, and forgets those before."""
        self._expected = list(indices)
        self._fetched = {}

    def __getitem__(self, index: int) -> Any:
        """Returns a sample."""
        if index not in self._fetched and not self._is_random:
            self._fetch(index)
        if index in self._fetched:
            return self._fetched.pop(index)
        return self._dataset[index]

    def _fetch(self, index: int) -> None:
        if index not in self._expected:
            return
        begin = self._expected.index(index)  # those before came from the decoded store
        indices = list(dict.fromkeys(self._expected[begin : begin + AT_ONCE]))
        self._expected = self._expected[begin + AT_ONCE :]
        try:
            found, self._is_random = watched(
                lambda: list(self._dataset.__getitems__(indices)), self._seed, self._own
            )
        except Exception:
            return  # one by one, to see which it is
        finally:
            self._seed()
        if not self._is_random and len(found) == len(indices):
            self._fetched = dict(zip(indices, found, strict=True))
