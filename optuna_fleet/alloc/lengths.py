"""How many epochs a trial will still need: what it says itself, and the sweep's survival curve.

`trial.epochs(n)` bounds a trial. Whether it comes so far (it may be pruned, or converge) nobody
knows, but trials of one sweep resemble each other. So the share that ends after k epochs, of those
that come so far and could go on, is estimated as Kaplan and Meier do: trials under way, and those
that went on to their bound, count for as long as they were seen. Where few were seen, the share is
drawn to that of all epochs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_CORRECTION = 2.0
"""A prediction from outside counts up to this factor from what the sweep itself says."""

_LONGEST = 1024
"""Epochs that are told apart, of those that were done and of those to come."""

_POWER = 3.0
"""Of the mean of the epochs to go. The last trials decide when a sweep ends: long lives count more
than in the plain mean (1)."""

_PRIOR_ENDS, _PRIOR_EPOCHS = 0.5, 50.0  # half a trial has ended in so many epochs
_POOLED_TRIALS = 5.0  # for which the share of all epochs stands at each
_STRETCH = 1.25  # how much longer than the longest that ended a trial without a bound may be
_FEW_EPOCHS = 10  # that a trial without a bound has to go, if nothing is known

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class SurvivalCurve:
    """How the trials of a sweep end.

    Attributes:
        goes_on: [k]: share that goes on after k epochs, of the trials that come so far and could.
        later: That share after more epochs than those.
        longest: Most epochs of a trial that has ended; 0 if none has.
        furthest: Most epochs of any trial.
    """

    goes_on: FloatArray
    later: float
    longest: int
    furthest: int

    def remaining_epochs(
        self, epochs_done: int, max_epochs: int | None = None, predicted: float | None = None
    ) -> float:
        """Epochs a trial will still need, at least one.

        Args:
            epochs_done: Epochs it has done.
            max_epochs: Epochs after which it ends at the latest; None if that is not known. One
                that goes on nevertheless is expected to end soon.
            predicted: Epochs in all that somebody else predicts; bounded by ``MAX_CORRECTION``, so
                that a wrong prediction does limited harm.
        """
        most = max(1, self._bound(epochs_done) if max_epochs is None else max_epochs - epochs_done)
        told_apart = min(most, _LONGEST)
        alive = self._alive(epochs_done, told_apart)
        later = alive[-1] * (float(most) ** _POWER - told_apart**_POWER)
        own: float = float(alive @ _STEPS[:told_apart] + later) ** (1 / _POWER)
        if predicted is not None and math.isfinite(predicted):
            low, high = own / MAX_CORRECTION, own * MAX_CORRECTION
            own = min(max(predicted - epochs_done, low), high)
        return max(1.0, own if max_epochs is None else min(own, most))

    def _bound(self, epochs_done: int) -> int:
        """The most epochs to go of a trial that does not say."""
        if not self.longest:
            return max(self.furthest, _FEW_EPOCHS)
        return math.ceil(_STRETCH * max(self.longest, epochs_done)) - epochs_done

    def _alive(self, epochs_done: int, num_epochs: int) -> FloatArray:
        """[j]: share of those that have come so far that does j epochs more, and another one."""
        alive = np.full(num_epochs, self.later)
        own = self.goes_on[epochs_done + 1 : epochs_done + num_epochs]
        alive[1 : len(own) + 1] = own
        alive[0] = 1.0
        return alive.cumprod()


_STEPS: FloatArray = np.diff(np.arange(_LONGEST + 1.0) ** _POWER)


def survival_curve(
    ended: Iterable[int], under_way: Iterable[int], bounded: Iterable[int] = ()
) -> SurvivalCurve:
    """The survival curve of a sweep.

    Args:
        ended: Epochs of each trial that has ended although it could go on.
        under_way: Epochs that each trial that has not ended has done.
        bounded: Epochs of each trial that has ended because it was to have no more.
    """
    ends, goes, stops = _counts(ended), _counts(under_way), _counts(bounded)
    could = (ends + goes + stops)[::-1].cumsum()[::-1] - stops
    could[0] = ends[0] = 0.0
    longest = max(_last(ends), _last(stops))
    furthest = max(longest, _last(goes))
    pooled = (ends.sum() + _PRIOR_ENDS) / (could.sum() + _PRIOR_EPOCHS)
    share = (ends + _POOLED_TRIALS * pooled) / (could + _POOLED_TRIALS)
    return SurvivalCurve(
        goes_on=1 - share[: furthest + 1], later=1 - pooled, longest=longest, furthest=furthest
    )


def _counts(epochs: Iterable[int]) -> FloatArray:
    clipped = [min(e, _LONGEST) for e in epochs]
    return np.bincount(clipped, minlength=_LONGEST + 1).astype(np.float64)


def _last(counts: FloatArray) -> int:
    return int(counts.nonzero()[0].max(initial=0))
