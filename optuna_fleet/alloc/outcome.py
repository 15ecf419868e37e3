"""Widths worth most over the forward-looking time (BFTrainer, section 3).

For each trial j the worth of n devices is its outcome over the time for which a decision is
expected to last, less what the move there costs (Eq. 13 to 16)::

    v_j(n) = T_fwd * O_j(n) - O_j(C_j) * (R_up if n > C_j, R_down if n < C_j, else 0)

with C_j its devices now and O_j its outcome per second: its throughput, its scaling efficiency,
or what the user says.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from optuna_fleet.alloc.counts import CountProblem
from optuna_fleet.alloc.problem import AllocationProblem, Candidate

FloatArray = NDArray[np.float64]
Objective = Callable[[Candidate, int], float]
"""Outcome per second of a trial on so many devices, >= 0."""

OBJECTIVES = ("throughput", "scaling-efficiency")
"""Samples per second; devices that scale perfectly, r(m) / r(1)."""


def count_problem(
    problem: AllocationProblem, objective: str | Objective, forward_looking_s: float
) -> tuple[list[Candidate], CountProblem]:
    """The count problem of an allocation problem, as if every candidate could move.

    Returns:
        The candidates, in the order of their numbers, and their count problem.
    """
    candidates = list(problem.by_number.values())
    limit = problem.num_devices
    values = tuple(
        _values(
            c,
            min(problem.kept_width(c) or 0, c.widest),
            forward_looking_s,
            _outcomes(c, objective, limit),
        ).reshape(1, -1)
        for c in candidates
    )
    return candidates, CountProblem(values=values, capacities=(limit,))


def _outcomes(candidate: Candidate, objective: str | Objective, limit: int) -> FloatArray:
    """Outcome per second on 0, 1, ... devices."""
    widest = min(candidate.widest, limit)
    if callable(objective):
        outcomes = np.array([0.0, *(objective(candidate, m) for m in range(1, widest + 1))])
        if not np.isfinite(outcomes).all():
            raise ValueError(
                f"`objective` gives {outcomes[1:].tolist()} for trial {candidate.number} on 1 to "
                f"{widest} devices, but must give finite numbers."
            )
        return outcomes
    return _of_rates(candidate.rates, objective == "throughput")[: widest + 1]


@lru_cache(maxsize=4096)
def _of_rates(rates: tuple[float, ...], is_throughput: bool) -> FloatArray:
    """Rates on 0, 1, ... devices, in samples/s or in r(1). Not to be changed."""
    all_rates = np.array([0.0, *rates])
    return all_rates if is_throughput else all_rates / rates[0]


def _values(
    candidate: Candidate, now: int, forward_looking_s: float, outcomes: FloatArray
) -> FloatArray:
    values = forward_looking_s * outcomes
    values[:now] -= outcomes[now] * candidate.rescale_down_s
    values[now + 1 :] -= outcomes[now] * candidate.rescale_up_s
    values[1 : candidate.min_devices] = -np.inf
    return values
