"""Windows: the flotillas that the model may open.

A window is a rate and, where that matters, a phase; it admits what one flotilla can hold whose
slowest trial has that rate. Where the preprocessors' capacity counts, the rate is that of the
*fastest* trial, because that is what the flotilla's stream draws. Either way the windows of all
rates that occur contain every flotilla, so nothing is lost.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from optuna_fleet.alloc.problem import AllocationProblem

MAX_REFERENCE_RATES = 40
"""Rates that are tried as the slowest (fastest) of a flotilla at most, over all phases."""

_FEWEST_RATES_PER_PHASE = 8

Key = tuple[int, str, int]
"""(trial number, device type, devices)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A flotilla that may be opened.

    Attributes:
        phase: The phase of its trials; 0 where phases don't matter.
        rate: Its slowest rate, in samples/s; or its fastest one, which its stream draws.
        is_fastest: Which of the two.
    """

    phase: int
    rate: float
    is_fastest: bool

    def admits(self, rate: float, rate_spread: float) -> bool:
        """Whether a trial of that rate, in the same phase, may join."""
        slow, fast = (rate, self.rate) if self.is_fastest else (self.rate, rate)
        # Multiplied as in `group_by_rate`: a quotient might round to the other side.
        return slow <= fast <= slow * rate_spread


def windows(
    problem: AllocationProblem, rates: Mapping[Key, float], must: Set[Key]
) -> list[Window]:
    """The windows to try; see :func:`reference_rates` for problems with many rates.

    Args:
        problem: Whose rules count.
        rates: Rate of each option, in samples/s.
        must: Options that need a window that draws no more than they do: of who can't move.
    """
    limited = problem.preprocess_samples_per_s is not None
    phases = phases_of(problem)
    by_phase: dict[int, list[Key]] = defaultdict(list)
    for key in rates:
        by_phase[phases[key[0]]].append(key)
    most = max(_FEWEST_RATES_PER_PHASE, MAX_REFERENCE_RATES // max(1, len(by_phase)))
    found = []
    for phase, keys in sorted(by_phase.items()):
        references = reference_rates((rates[k] for k in keys), most=most, from_above=limited)
        references = sorted({*references, *(rates[k] for k in keys if k in must)})
        if math.isinf(problem.rate_spread) and not limited:
            del references[1:]
        found += [Window(phase=phase, rate=rate, is_fastest=limited) for rate in references]
    return found


def phases_of(problem: AllocationProblem) -> dict[int, int]:
    """Phase of each trial; 0 for all where phases don't matter."""
    return {c.number: c.epochs_done if problem.phases else 0 for c in problem.candidates}


def reference_rates(
    rates: Iterable[float], *, most: int = MAX_REFERENCE_RATES, from_above: bool = False
) -> list[float]:
    """Rates that may be the slowest of a flotilla, or the fastest, at most ``most`` of them.

    Thinned ones are even in the logarithm and rounded up to a rate that occurs, so that a rate
    above one stays close to one.

    Args:
        rates: All that occur, in samples/s.
        most: How many to return at most.
        from_above: Choose rates that may be the fastest, and round down. A stream then counts as
            up to one step of the grid faster than it is: the capacity is kept, not all of it used.
    """
    distinct = sorted(set(rates))
    if len(distinct) <= most:
        return distinct
    step = (distinct[-1] / distinct[0]) ** (1 / (most - 1))
    grid = [distinct[0] * step**k for k in range(most)]
    if from_above:
        floors = (distinct[bisect.bisect_right(distinct, g * (1 + 1e-12)) - 1] for g in grid[:-1])
        return sorted({*floors, distinct[-1]})
    return sorted(
        {next((r for r in distinct if r >= g * (1 - 1e-12)), distinct[-1]) for g in grid}
    )


def by_window(
    rates: Mapping[Key, float], tried: Mapping[int, Window], rate_spread: float
) -> dict[tuple[int, ...], list[Key]]:
    """Options of one trial by the indices of the windows that admit them.

    One row of the model serves all options of equal windows.
    """
    found: dict[tuple[int, ...], list[Key]] = defaultdict(list)
    for key, rate in rates.items():
        found[tuple(k for k, w in tried.items() if w.admits(rate, rate_spread))].append(key)
    return found
