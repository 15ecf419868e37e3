"""The fluid relaxation: if devices were divisible, how fast could all trials finish together?

Time-sharing between two widths reaches every point below the least concave majorant of a trial's
rate. So the fewest devices for a rate are read off that majorant, and all trials finish together,
and soonest, at the pace where these devices are just as many as there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
Rates = tuple[float, ...]
"""(r(1), ..., r(M)) in samples/s."""

_MAX_STEPS = 200
_TOLERANCE = 1e-13


def fluid_optimum(
    rates: Sequence[Rates], work: Sequence[float] | FloatArray, num_devices: int
) -> tuple[float, FloatArray]:
    """The least time in which all the work can be done, and the widths that do it.

    Args:
        rates: Rates of each trial; widths beyond the devices are not used.
        work: Samples each has to train, > 0.
        num_devices: Devices of the fleet, >= 1.

    Returns:
        Seconds T, and fractional widths that sum to at most the devices. At these trial i trains
        at work[i] / T, or faster: where trials at their peak decide T, the others share what they
        leave, so as to finish together.
    """
    start, rise, devices = _padded([_segments(r[:num_devices]) for r in rates])
    needed = np.asarray(work, dtype=np.float64)[:, None]

    def widths(pace: float) -> FloatArray:
        filled = ((pace * needed - start) / rise).clip(0.0, 1.0)
        total: FloatArray = (devices * filled).sum(axis=1)
        return total

    peaks = (start + rise * (devices > 0)).max(axis=1)
    paces = peaks / needed[:, 0]
    low, high = 0.0, float(paces.max())
    if widths(high).sum() <= num_devices:
        return 1 / float(paces.min()), widths(high)
    for _ in range(_MAX_STEPS):
        middle = (low + high) / 2
        if widths(middle).sum() > num_devices:
            high = middle
        else:
            low = middle
        if high - low <= _TOLERANCE * high:
            break
    return 1 / min(low, float(paces.min())), widths(low)


@lru_cache(maxsize=4096)
def _segments(rates: Rates) -> FloatArray:
    """Least concave majorant of m -> r(m) with r(0) = 0, up to its peak.

    Returns:
        [3, number of segments]: rate at its start, rise of the rate, devices it takes.
    """
    heights, widths = _corners(rates)
    return np.stack([heights[:-1], np.diff(heights), np.diff(widths)])


@lru_cache(maxsize=4096)
def _corners(rates: Rates) -> FloatArray:
    """[2, number of corners] of that majorant: rates and devices, from 0 to its peak."""
    corners = [(0, 0.0)]
    for m, rate in enumerate(rates, 1):
        if rate <= corners[-1][1]:
            continue
        while len(corners) > 1 and _lies_below(corners, m, rate):
            corners.pop()
        corners.append((m, rate))
    found: FloatArray = np.array(corners, dtype=np.float64).T[::-1]
    return found


def _lies_below(corners: list[tuple[int, float]], m: int, rate: float) -> bool:
    """Whether the last corner is not above the line from the one before it to (m, rate)."""
    (m0, r0), (m1, r1) = corners[-2:]
    return (r1 - r0) * (m - m1) <= (rate - r1) * (m1 - m0)


def _padded(segments: list[FloatArray]) -> FloatArray:
    """[3, trials, most segments]; the padding takes no devices."""
    padded = np.zeros((3, len(segments), max(s.shape[1] for s in segments)))
    padded[1] = 1.0
    for i, own in enumerate(segments):
        padded[:, i, : own.shape[1]] = own
    return padded


def devices_for(rates: Rates, pace: float) -> float:
    """Fewest devices, time-shared, for so many samples/s; in proportion beyond the peak."""
    heights, widths = _corners(rates)
    if pace >= heights[-1]:
        return float(widths[-1] * pace / heights[-1])
    return float(np.interp(pace, heights, widths))


def fluid_paces(
    rates: Sequence[Mapping[str, Rates]],
    work: Sequence[float] | FloatArray,
    num_by_kind: Mapping[str, int],
) -> FloatArray:
    """The pace of each trial in the fluid optimum, in samples/s, by one rate for all devices.

    With several types that is the rate on the one that suits it best.
    """
    total = sum(num_by_kind.values())
    own = [tuple(np.max([r[kind] for kind in num_by_kind], axis=0).tolist()) for r in rates]
    _, widths = fluid_optimum(own, work, total)
    at = zip(own, widths.tolist(), strict=True)
    return np.array([np.interp(m, *_corners(r[:total])[::-1]) for r, m in at])
