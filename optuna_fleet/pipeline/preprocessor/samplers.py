"""Orders that a user's sampler draws: epoch e is the same for all trials.

In an order, sample ``i`` is the number ``i`` where it comes first, and ``i + k * length`` where it
comes for the k-th time after that: it is augmented in another way each time.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.pipeline.preprocessor.order import (
    own_randomness,
    permutation,
    seed_order,
)
from optuna_fleet.pipeline.preprocessor.source import Source
from optuna_fleet.pipeline.spec import DatasetSpec, PipelineSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray


def epoch_order(source: Source, spec: DatasetSpec, seed: int, epoch: int) -> NDArray[np.int64]:
    """Returns the order of an epoch of a data set, of shape [num_samples]; see above.

    Raises:
        FleetConfigError: A sampler does not draw what it must.
        Exception: What it raises.
    """
    sampler = source.samplers.get(spec.name)
    if sampler is None:
        return permutation(seed, spec.name, epoch, spec.num_samples)
    return _numbered(_drawn(source, spec, seed, epoch, sampler), spec.length)


def check(source: Source, spec: PipelineSpec) -> None:
    """Draws an epoch twice from each of the user's samplers.

    Raises:
        FleetConfigError: One does not draw what it must, or not the same again.
        Exception: What it raises.
    """
    for name in source.samplers:
        dataset = spec.dataset(name)
        first, again = (epoch_order(source, dataset, spec.seed, 0) for _ in range(2))
        if not np.array_equal(first, again):
            raise FleetConfigError(
                f"The sampler of data set {name!r} draws one epoch differently each time, but "
                "all processes have to draw the same. Let it take its random numbers from "
                "torch's, NumPy's or Python's global functions, which are seeded for each epoch, "
                "from a generator that it keeps, or from the number given to its `set_epoch`."
            )


def _drawn(
    source: Source, spec: DatasetSpec, seed: int, epoch: int, sampler: Any
) -> NDArray[np.int64]:
    # A copy: what it changes in itself must not decide on the next epoch that is drawn here.
    known = {id(each): each for dataset in source.datasets.values() for each in _within(dataset)}
    sampler = copy.deepcopy(sampler, memo := dict(known))
    copies = [memo[id(each)] for each in source.generators if id(each) in memo]
    with own_randomness():
        seed_order(seed, spec.name, epoch, [*source.generators, *copies])
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        drawn = list(islice(sampler, spec.num_samples + 1))
    return _checked(drawn, spec)


def _within(dataset: Any) -> Iterator[Any]:
    """The data set, and those it is made of."""
    yield dataset
    inner = getattr(dataset, "datasets", None) or [getattr(dataset, "dataset", None)]
    for each in inner if isinstance(inner, (list, tuple)) else ():
        if each is not None:
            yield from _within(each)


def _checked(drawn: list[Any], spec: DatasetSpec) -> NDArray[np.int64]:
    whose = f"The sampler of data set {spec.name!r}"
    if len(drawn) != spec.num_samples:
        more = "more" if len(drawn) > spec.num_samples else f"{len(drawn)}"
        raise FleetConfigError(
            f"{whose} draws {more} samples in an epoch, but its len() is {spec.num_samples}. They "
            "must be the same, in each epoch."
        )
    try:
        indices = np.fromiter(map(operator.index, drawn), np.int64, len(drawn))
    except TypeError:
        odd = next(each for each in drawn if not hasattr(each, "__index__"))
        hint = ""
        if isinstance(odd, Iterable) and not isinstance(odd, str):
            hint = (
                " A batch sampler can't be used, as each trial has a batch size of its own: give "
                "a sampler of single indices."
            )
        raise FleetConfigError(
            f"{whose} draws {odd!r:.60}, but must draw indices, of type int.{hint}"
        ) from None
    low, high = int(indices.min()), int(indices.max())
    if low < 0 or high >= spec.length:
        raise FleetConfigError(
            f"{whose} draws index {low if low < 0 else high}, but the data set has "
            f"{spec.length} samples: indices are from 0 to {spec.length - 1}."
        )
    return indices


def _numbered(indices: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    order = np.argsort(indices, kind="stable")
    begins = np.flatnonzero(np.diff(indices[order], prepend=-1))
    runs = np.diff(begins, append=len(indices))
    times = np.arange(len(indices)) - np.repeat(begins, runs)
    numbered = np.empty_like(indices)
    numbered[order] = indices[order] + times * length
    return numbered
