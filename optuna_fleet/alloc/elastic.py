"""The elastic allocator: at every event, what all trials should have, done as far as possible now.

It unites BFTrainer (section 3: maximise the outcome over the forward-looking time) with the aim of
a sweep, to be done soon (:mod:`optuna_fleet.alloc.makespan`).

For each trial j the worth of n devices is its outcome over the time for which a decision is
expected to last, less what the move there costs (Eq. 13 to 16)::

    v_j(n) = T_fwd * O_j(n) - O_j(C_j) * (R_up if n > C_j, R_down if n < C_j, else 0)

with C_j its devices now and O_j its outcome per second: its throughput, its scaling efficiency,
or what the user says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from optuna_fleet.alloc.adjust import Wishes, place_changes, realise
from optuna_fleet.alloc.assembly import assemble, fill_idle
from optuna_fleet.alloc.counts import CountProblem, Counts, solve_exactly
from optuna_fleet.alloc.fluid import FloatArray
from optuna_fleet.alloc.makespan import makespan_wishes
from optuna_fleet.alloc.problem import AllocationProblem, Candidate, Plan
from optuna_fleet.alloc.streams import group_widths
from optuna_fleet.arguments import check_number, check_that

Objective = Callable[[Candidate, int], float]
"""Outcome per second of a trial on so many devices, >= 0."""

OBJECTIVES = ("throughput", "scaling-efficiency")
"""Samples per second; devices that scale perfectly, r(m) / r(1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticAllocator:
    """Re-decides all widths at each event; moves only what gains by it.

    Attributes:
        objective: "makespan", to be done soon; "throughput" or "scaling-efficiency", to get most
            done over the forward-looking time; or a function (candidate, devices) -> outcome per
            second, for the same.
        forward_looking_s: Seconds for which a decision is expected to last: a move must gain
            within them more than it costs. Not for "makespan".
        hedge: For "makespan", how much earlier trials with long epochs aim to finish; see
            :func:`optuna_fleet.alloc.makespan.makespan_wishes`.
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
        check_number("forward_looking_s", self.forward_looking_s, above=0)

    def allocate(self, problem: AllocationProblem) -> Plan:
        """Solves ``problem``; see :class:`Allocator`."""
        if not problem.candidates or not problem.num_devices:
            return assemble(problem, [], allocator=self.name, status="trivial")
        if self.objective == "makespan":
            widths = realise(problem, makespan_wishes(problem, self.hedge))
            widths = fill_idle(problem, widths)  # kept for who grows later, they would be idle
            status, gap = "heuristic", None
        else:
            wishes, counts = self._worth_most(problem, self.objective)
            widths = realise(problem, wishes)
            status, gap = counts.status, counts.gap
        return assemble(
            problem,
            group_widths(problem, widths),
            placement=place_changes(problem, widths),
            allocator=self.name,
            status=status,
            gap=gap,
        )

    def _worth_most(
        self, problem: AllocationProblem, objective: str | Objective
    ) -> tuple[Wishes, Counts]:
        candidates, counting = count_problem(problem, objective, self.forward_looking_s)
        counts = solve_exactly(counting)
        widths = {c.number: n for c, (_, n) in zip(candidates, counts.widths, strict=True) if n}
        values = {c.number: v[0] for c, v in zip(candidates, counting.values, strict=True)}

        def pays(candidate: Candidate, now: int, m: int) -> bool:
            return bool(values[candidate.number][m] > values[candidate.number][now])

        return Wishes(widths=widths, pays=pays), counts


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
