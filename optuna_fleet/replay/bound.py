"""A lower bound for any schedule: the clairvoyant, fluid, malleable optimum.

Devices are divisible, moves cost nothing, and every trial's length is known: then each trial
trains at a constant rate ``w_i / T`` all the time, on the fewest devices that give it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_ITERATIONS = 200

FloatArray = NDArray[np.float64]


def upper_hull(rates: Sequence[float]) -> tuple[FloatArray, FloatArray]:
    """Least concave majorant of m -> r(m) with r(0) = 0, up to its peak.

    Args:
        rates: (r(1), ..., r(M)) in samples/s.

    Returns:
        Devices and rates of its corners, both rising, from (0, 0).
    """
    widths, heights = [0.0], [0.0]
    for m, rate in enumerate(rates, 1):
        if rate <= heights[-1]:
            continue
        while len(widths) > 1 and _slope(widths, heights) <= (rate - heights[-1]) / (
            m - widths[-1]
        ):
            widths.pop()
            heights.pop()
        widths.append(float(m))
        heights.append(rate)
    return np.array(widths), np.array(heights)


def _slope(widths: list[float], heights: list[float]) -> float:
    return (heights[-1] - heights[-2]) / (widths[-1] - widths[-2])


def fluid_bound(
    work: Sequence[float], rates: Sequence[Sequence[float]], num_devices: int
) -> float:
    """Least makespan in seconds of any schedule, however clever.

    Args:
        work: Samples each trial has to train.
        rates: (r(1), ..., r(M)) in samples/s of each.
        num_devices: Devices of the fleet.

    Returns:
        The least T with ``sum_i d_i(w_i / T) <= num_devices``, where d_i is the inverse of trial
        i's least concave rate, to a relative 1e-12; 0 without work.
    """
    trials = [(w, upper_hull(r[:num_devices])) for w, r in zip(work, rates, strict=True) if w > 0]
    if not trials:
        return 0.0
    low = max(w / heights[-1] for w, (_, heights) in trials)
    if _devices(trials, low) <= num_devices:
        return low
    high = low
    while _devices(trials, high) > num_devices:
        high *= 2
    for _ in range(_ITERATIONS):
        middle = (low + high) / 2
        if _devices(trials, middle) > num_devices:
            low = middle
        else:
            high = middle
        if high - low <= 1e-12 * high:
            break
    return high


def _devices(
    trials: list[tuple[float, tuple[FloatArray, FloatArray]]], makespan_s: float
) -> float:
    return sum(float(np.interp(w / makespan_s, hull[1], hull[0])) for w, hull in trials)
