"""How many epochs a trial will still need, learnt from the sweep itself.

Nobody knows when a trial converges or is pruned. But trials of one sweep resemble each other, so
the epochs they need are taken as draws from one normal distribution, of unknown mean and spread.
Ended trials tell a draw, those under way that theirs is larger than what they have done. With a
prior that prefers no scale of the mean, a posterior over a grid follows, and from it the expected
length of a trial that has come so far.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

LONGEST = 256
"""Epochs a trial can need in the model; those that go on after them are expected to end soon."""

MAX_CORRECTION = 2.0
"""A prediction from outside counts up to this factor from what the sweep itself says."""

_MEANS = 3.0 * 1.06 ** np.arange(72)
_SPREADS = np.array([0.04, 0.07, 0.1, 0.14, 0.19, 0.25, 0.32, 0.4])  # of the mean
_LEAST = 1e-12

FloatArray = NDArray[np.float64]


def expected_lengths(ended: Iterable[int], under_way: Iterable[int]) -> FloatArray:
    """Expected number of epochs in all of a trial that has done k, for k = 0..LONGEST.

    A trial that outlasts all that ended says that the model is wrong about it. It may then go on
    for as long again as it has, not for longer.

    Args:
        ended: Epochs of each trial that has ended.
        under_way: Epochs that each of the others has done.
    """
    prior, log_equal, log_more, lengths = _grid()
    ends = _counts(ended, least=1)
    log_posterior = prior + log_equal @ ends + log_more @ _counts(under_way)
    weights = np.exp(log_posterior - log_posterior.max())
    expected: FloatArray = weights @ lengths / weights.sum()
    if longest := int(ends.nonzero()[0].max(initial=0)):
        expected = np.minimum(expected, 2 * np.maximum(np.arange(LONGEST + 1), longest))
    return expected


def remaining_epochs(expected: FloatArray, epochs_done: int, predicted: float | None) -> float:
    """Epochs a trial will still need, at least one.

    Args:
        expected: What `expected_lengths` says.
        epochs_done: Epochs it has done.
        predicted: Epochs in all that somebody else predicts; bounded by ``MAX_CORRECTION``, so
            that a wrong prediction does limited harm.
    """
    own = float(expected[min(epochs_done, LONGEST)]) - min(epochs_done, LONGEST)
    if predicted is not None and math.isfinite(predicted):
        low, high = own / MAX_CORRECTION, own * MAX_CORRECTION
        own = min(max(predicted - epochs_done, low), high)
    return max(own, 1.0)


def _counts(epochs: Iterable[int], least: int = 0) -> FloatArray:
    clipped = [min(max(e, least), LONGEST) for e in epochs]
    return np.bincount(clipped, minlength=LONGEST + 1).astype(np.float64)


@lru_cache(maxsize=1)
def _grid() -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Per (mean, spread): log prior, log P(E = k), log P(E > k), E[E | E > k]."""
    mean, spread = (x.ravel() for x in np.meshgrid(_MEANS, _SPREADS, indexing="ij"))
    ends = np.arange(LONGEST + 1) + 0.5
    z = (ends - mean[:, None]) / (mean * spread * math.sqrt(2))[:, None]
    below = 0.5 * (1 + np.vectorize(math.erf)(z))
    equal = np.zeros_like(below)
    equal[:, 1:] = np.maximum(np.diff(below, axis=1), _LEAST)
    equal /= equal.sum(axis=1, keepdims=True)
    more, lengths = np.full_like(equal, _LEAST), np.full_like(equal, LONGEST + 1.0)
    more[:, :-1] = _sums_above(equal)
    lengths[:, :-1] = _sums_above(equal * np.arange(LONGEST + 1)) / more[:, :-1]
    return -np.log(mean), np.log(np.maximum(equal, _LEAST)), np.log(more), lengths


def _sums_above(values: FloatArray) -> FloatArray:
    """Row sums over all later columns, for all columns but the last."""
    sums: FloatArray = values[:, :0:-1].cumsum(axis=1)[:, ::-1]
    return sums
