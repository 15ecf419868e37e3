"""Streams: which trials can share one, and what all streams draw from the preprocessors.

A flotilla shares one stream of preprocessed data. The stream runs as fast as the flotilla's
fastest trial: the others find their samples in the ring or the pool.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from optuna_fleet.alloc.problem import SEVERAL, AllocationProblem

Widths = dict[int, int]
"""Trial number -> devices it gets."""

Grouping = Callable[[AllocationProblem, Mapping[int, int]], list[Widths]]
"""Says which flotillas a problem's widths form; :func:`group_widths` is one."""

CAPACITY_TOLERANCE = 1e-6
"""Relative excess over the capacity that is overlooked: what a solver's tolerance lets through."""


def group_by_rate(
    rates: Mapping[int, float], rate_spread: float, *, from_fastest: bool = False
) -> list[list[int]]:
    """The fewest flotillas in which no trial is faster than ``rate_spread`` times the slowest.

    Args:
        rates: Trial number -> samples/s.
        rate_spread: Fastest over slowest rate within one flotilla, at most; may be ``math.inf``.
        from_fastest: Fill each flotilla from its fastest trial down, not from its slowest up. As
            few flotillas, and of these the ones whose streams' rates have the least sum: whoever
            is the fastest left must head a stream, and all it admits join at no cost.

    Returns:
        Trial numbers of each flotilla, slowest flotilla and slowest trial first.
    """
    sign = -1 if from_fastest else 1
    groups: list[list[int]] = []
    for number in sorted(rates, key=lambda t: (rates[t], t))[::sign]:
        if groups:
            slow, fast = sorted((rates[groups[-1][0]], rates[number]))
            if fast <= slow * rate_spread:
                groups[-1].append(number)
                continue
        groups.append([number])
    return [group[::sign] for group in groups[::sign]]


def group_widths(problem: AllocationProblem, widths: Mapping[int, int]) -> list[Widths]:
    """The fewest flotillas these widths need, slowest first; see :func:`group_by_rate`.

    Where the preprocessors' capacity counts, they are also those that draw least.
    """
    by_number = problem.by_number
    rates = {t: by_number[t].rate(m) for t, m in widths.items()}
    apart: dict[int, dict[int, float]] = defaultdict(dict)
    for number, rate in rates.items():
        apart[by_number[number].epochs_done if problem.phases else 0][number] = rate
    limited = problem.preprocess_samples_per_s is not None
    groups = [
        group
        for members in apart.values()
        for group in group_by_rate(members, problem.rate_spread, from_fastest=limited)
    ]
    groups.sort(key=lambda group: (rates[group[0]], group[0]))
    return [{t: widths[t] for t in group} for group in groups]


def demand(problem: AllocationProblem, groups: Iterable[Mapping[int, int]]) -> float:
    """What the streams of these flotillas draw together, in samples/s."""
    by_number = problem.by_number
    return sum(max(by_number[t].rate(m) for t, m in group.items()) for group in groups)


def stream_limit(problem: AllocationProblem) -> float:
    """What the streams of a plan may draw together, in samples/s; ``math.inf`` for any amount.

    It is the preprocessors' capacity or, where nothing could keep to that, what can't be avoided:
    a capacity only slows trials, it does not forbid them. That is the draw of the trials that
    can't move, in as few streams as their rates and phases allow. If there are none, it is that of
    the slowest trial that can fly at all, on as few devices as it can: it flies, alone or with
    others that are no faster (trials that need several device types only if there are no others).
    Trials that fly count on the type they are on, which a fallback does not change.
    """
    if problem.preprocess_samples_per_s is None:
        return math.inf
    if pinned := problem.pinned:
        apart = replace(problem, phases=True)  # as it may be: in mid-epoch no stream is merged
        unavoidable = demand(apart, group_widths(apart, pinned))
    else:
        unavoidable, *_ = slowest(problem) or (0.0,)
    return max(problem.preprocess_samples_per_s, unavoidable)


def slowest(problem: AllocationProblem) -> tuple[float, str, int] | None:
    """Rate, device type and number of the trial that flies where nothing can be served."""
    found = [
        (problem.kind_now(c) not in ("", kind), c.rates_on(kind)[c.min_devices - 1], kind, number)
        for kind, total in problem.num_by_kind.items()
        for number, c in problem.by_number.items()
        if c.min_devices <= total
    ] or [
        (False, c.rates_on(SEVERAL)[c.min_devices - 1], SEVERAL, number)
        for number, c in problem.by_number.items()
        if c.spans_types and c.min_devices <= problem.num_devices
    ]
    return min(found)[1:] if found else None


def serves(
    problem: AllocationProblem, *, grouping: Grouping = group_widths
) -> Callable[[Mapping[int, int]], bool]:
    """Says of widths whether the preprocessors can serve the flotillas they form."""
    limit = stream_limit(problem)
    if math.isinf(limit):
        return lambda widths: True
    return lambda widths: affordable(demand(problem, grouping(problem, widths)), limit)


def affordable(drawn: float, limit: float) -> bool:
    """Whether streams that draw ``drawn`` samples/s together are within :func:`stream_limit`."""
    return drawn <= limit * (1 + CAPACITY_TOLERANCE)
