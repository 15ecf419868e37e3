"""The fluid relaxation: if devices were divisible, how fast could all trials finish together?

Time-sharing between two widths reaches every point below the least concave majorant of a trial's
rate. So the fewest devices for a rate are read off that majorant, and all trials finish together,
and soonest, at the pace where these devices are just as many as there are.

With several device types the least time is that of a linear program, which CBC solves. There a
trial is on devices of one type at a time: its shares of the time add up to at most 1 over all
types. To be on n_k of m devices of each type k counts as a share n_k / m of the time on m of them,
so that trials that span types are part of it, if more of a type than there are count as well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optuna_fleet.alloc.model import failing, new_model, optimized
from optuna_fleet.alloc.problem import AllocationFailed

FloatArray = NDArray[np.float64]
Rates = tuple[float, ...]
"""(r(1), ..., r(M)) in samples/s."""

_MAX_STEPS = 200
_TOLERANCE = 1e-13
_PATIENCE_S = 60.0
_PACE = 1e4  # worth of the pace: CBC takes what gains less than 1e-6 for nothing
_SLACK = 1e-5  # relative; what CBC's tolerances let through


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


def fluid_seconds(
    rates: Sequence[Mapping[str, Rates]], work: Sequence[float], num_by_kind: Mapping[str, int]
) -> float:
    """No schedule does the work sooner; moves are free, and every length is known.

    Args:
        rates: Device type -> rates of each trial there, on as many devices as it may have.
        work: Samples each has to train, > 0.
        num_by_kind: Devices of each type, >= 1.

    Returns:
        The fluid optimum, or less by what a solver's tolerance may hide.

    Raises:
        AllocationFailed: The solver failed.
    """
    # Alone on the devices that suit it best, each trial has this rate; it scales all numbers.
    alone = np.array([max(max(own[kind]) for kind in num_by_kind) for own in rates])
    needs = np.asarray(work) / alone
    slowest = float(needs.max())
    with failing():
        model = new_model()
        pace = _build(model, rates, alone.tolist(), (needs / slowest).tolist(), num_by_kind)
        if not optimized(model, _PATIENCE_S) or not pace.x:
            raise AllocationFailed("the solver did not solve the fluid relaxation")
        return slowest / float(pace.x) * (1 - _SLACK)


def _build(
    model: Any,
    rates: Sequence[Mapping[str, Rates]],
    alone: Sequence[float],
    needs: Sequence[float],
    num_by_kind: Mapping[str, int],
) -> Any:
    """The linear program, and in it the pace to be maximised."""
    import mip

    model.add_var(var_type=mip.BINARY)  # CBC tells standard output about models without integers
    pace = model.add_var(ub=1.0, obj=_PACE)
    used: dict[str, list[Any]] = defaultdict(list)
    for own, best, need in zip(rates, alone, needs, strict=True):
        shares, terms = [], []
        for kind in num_by_kind:
            heights, widths = _corners(own[kind])
            for rate, m in zip(heights[1:].tolist(), widths[1:].tolist(), strict=True):
                shares.append(share := model.add_var())
                terms.append(rate / best * share)
                used[kind].append(m * share)
        model += mip.xsum(shares) <= 1
        model += mip.xsum(terms) >= need * pace
    for kind, all_of in used.items():
        model += mip.xsum(all_of) <= num_by_kind[kind]
    return pace
