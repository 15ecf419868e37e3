"""Streams: which trials can share one, and what all streams draw from the preprocessors.

A flotilla shares one stream of preprocessed data. The stream runs as fast as the flotilla's
fastest trial: the others find their samples in the ring or the pool.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from optuna_fleet.alloc.problem import SEVERAL, AllocationProblem

CAPACITY_TOLERANCE = 1e-6
"""Relative excess over the capacity that is overlooked: what a solver's tolerance lets through."""


def flotillas_of(problem: AllocationProblem, rates: Mapping[int, float]) -> list[list[int]]:
    """The fewest flotillas of these trials; the slowest flotilla and the slowest trial first.

    In none is a trial faster than `rate_spread` times the slowest. Where the preprocessors'
    capacity counts, they are also those that draw least: each is filled from its fastest trial
    down, for whoever is the fastest left must head a stream, and all it admits join at no cost.
    """
    sign = 1 if problem.preprocess_samples_per_s is None else -1
    phases = phases_of(problem)
    groups: list[list[int]] = []
    for number in sorted(rates, key=lambda t: (phases[t], rates[t], t))[::sign]:
        if groups and phases[groups[-1][0]] == phases[number]:
            slow, fast = sorted((rates[groups[-1][0]], rates[number]))
            if fast <= slow * problem.rate_spread:
                groups[-1].append(number)
                continue
        groups.append([number])
    return sorted((g[::sign] for g in groups), key=lambda group: (rates[group[0]], group[0]))


def phases_of(problem: AllocationProblem) -> dict[int, int]:
    """Phase of each trial; 0 for all where phases don't matter."""
    return {c.number: c.epochs_done if problem.phases else 0 for c in problem.candidates}


def demand(problem: AllocationProblem, rates: Mapping[int, float]) -> float:
    """What the streams of these trials draw together, in as few flotillas as can be."""
    return sum(max(rates[t] for t in group) for group in flotillas_of(problem, rates))


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
    if problem.pinned:
        apart = replace(problem, phases=True)  # as it may be: in mid-epoch no stream is merged
        rates = {t: problem.by_number[t].rate(m) for t, m in problem.pinned.items()}
        unavoidable = demand(apart, rates)
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


def affordable(drawn: float, limit: float) -> bool:
    """Whether streams that draw ``drawn`` samples/s together are within :func:`stream_limit`."""
    return drawn <= limit * (1 + CAPACITY_TOLERANCE)
