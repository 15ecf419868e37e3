"""The elastic allocator: at every event, what trials should have of what can be had now.

It unites BFTrainer (section 3: maximise the outcome over the forward-looking time) with the aim of
a sweep, to be done soon (:mod:`optuna_fleet.alloc.makespan`), by one model
(:mod:`optuna_fleet.alloc.model`).

For each trial j the worth of n devices is its outcome over the time for which a decision is
expected to last, less what the move there costs (Eq. 13 to 16)::

    v_j(n) = T_fwd * O_j(n) - O_j(C_j) * (R_up if n > C_j, R_down if n < C_j, else 0)

with C_j its devices now and O_j its outcome per second: its throughput, its scaling efficiency,
or what the user says. Devices of another type cost R_up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache, partial

import numpy as np

from optuna_fleet.alloc.draft import Decision
from optuna_fleet.alloc.fluid import FloatArray
from optuna_fleet.alloc.makespan import makespan_worth
from optuna_fleet.alloc.model import decide
from optuna_fleet.alloc.placement import plan_of
from optuna_fleet.alloc.problem import AllocationProblem, Candidate, Plan
from optuna_fleet.alloc.program import Worth
from optuna_fleet.arguments import check_number, check_that

Objective = Callable[[Candidate, int], float]
"""Outcome per second of a trial on so many devices, >= 0."""

OBJECTIVES = ("throughput", "scaling-efficiency")
"""Samples per second; devices that scale perfectly, r(m) / r(1)."""

_MOST_S = 1e9  # centuries; without an end what moves cost would count for nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticAllocator:
    """Re-decides all widths at each event; moves only what gains by it.

    Attributes:
        objective: "makespan", to be done soon; "throughput" or "scaling-efficiency", to get most
            done over the forward-looking time; or a function (candidate, devices) -> outcome per
            second, for the same; the candidate's rates are those of the devices' type.
        forward_looking_s: Seconds for which a decision is expected to last: a move must gain
            within them more than it costs. Not for "makespan".
        hedge: For "makespan", how much earlier trials with long epochs aim to finish; see
            :func:`optuna_fleet.alloc.makespan.makespan_worth`.
    """

    objective: str | Objective = "makespan"
    forward_looking_s: float = 120.0
    hedge: float = 0.3
    name: str = field(default="elastic", init=False)

    def __post_init__(self) -> None:
        known = ("makespan", *OBJECTIVES)
        check_that(
            "objective",
            self.objective,
            lambda given: callable(given) or given in known,
            f"be one of {known} or a function",
        )
        check_number("forward_looking_s", self.forward_looking_s, above=0, most=_MOST_S)

    def allocate(self, problem: AllocationProblem) -> Plan:
        """Solves ``problem``; see :class:`Allocator`."""
        if not problem.candidates or not problem.num_devices:
            made = Decision(choice={}, status="trivial")
        else:
            made = decide(problem, self.worth(problem))
        return plan_of(problem, made, allocator=self.name)

    def worth(self, problem: AllocationProblem) -> Worth:
        """What devices are worth to each trial; of a problem with candidates and devices."""
        if self.objective == "makespan":
            return makespan_worth(problem, self.hedge)
        return partial(_gains, problem, self.objective, self.forward_looking_s)


def _gains(
    problem: AllocationProblem,
    objective: str | Objective,
    forward_looking_s: float,
    candidate: Candidate,
    kind: str,
) -> Iterable[tuple[int, float]]:
    """Gains over waiting by Eq. 16, of the widths that can be had of one type."""
    home = problem.kind_now(candidate)
    now = problem.kept_width(candidate) or 0
    outcomes = _outcomes(problem, candidate, kind, objective)
    lost = _outcomes(problem, candidate, home, objective)[now] if now else 0.0
    values = forward_looking_s * outcomes
    if home == kind:
        values[:now] -= lost * candidate.rescale_down_s
        values[now + 1 :] -= lost * candidate.rescale_up_s
    else:
        values[0] -= lost * candidate.rescale_down_s
        values[1:] -= lost * candidate.rescale_up_s
    gains = values - values[0]
    return zip(
        range(candidate.min_devices, len(gains)),
        gains[candidate.min_devices :].tolist(),
        strict=True,
    )


def _outcomes(
    problem: AllocationProblem, candidate: Candidate, kind: str, objective: str | Objective
) -> FloatArray:
    """Outcome per second on 0, 1, ... devices of a type."""
    widest = min(candidate.widest, problem.num_devices)
    rates = candidate.rates_on(kind)[:widest]
    if not callable(objective):
        alone = max(candidate.rates_on(k)[0] for k in problem.num_by_kind)
        return _of_rates(rates, 1.0 if objective == "throughput" else alone)
    there = candidate.as_on(kind)
    outcomes = np.array([0.0, *(objective(there, m) for m in range(1, widest + 1))])
    if not np.isfinite(outcomes).all():
        raise ValueError(
            f"`objective` gives {outcomes[1:].tolist()} for trial {candidate.number} on 1 to "
            f"{widest} devices, but must give finite numbers."
        )
    return outcomes


@lru_cache(maxsize=4096)
def _of_rates(rates: tuple[float, ...], unit: float) -> FloatArray:
    """Rates on 0, 1, ... devices in that unit. Not to be changed."""
    return np.array([0.0, *rates]) / unit
