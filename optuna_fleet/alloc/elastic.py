"""The elastic allocator: at every event, what all trials should have, done as far as possible now.

It unites BFTrainer (section 3: maximise the outcome over the forward-looking time) with the aim of
a sweep, to be done soon (:mod:`optuna_fleet.alloc.makespan`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from optuna_fleet.alloc.adjust import Wishes, place_changes, realise
from optuna_fleet.alloc.assembly import assemble, fill_idle
from optuna_fleet.alloc.counts import Counts, solve_exactly
from optuna_fleet.alloc.makespan import makespan_wishes
from optuna_fleet.alloc.outcome import OBJECTIVES, Objective, count_problem
from optuna_fleet.alloc.problem import AllocationProblem, Candidate, Plan
from optuna_fleet.alloc.streams import group_widths
from optuna_fleet.exceptions import FleetConfigError


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
        if not callable(self.objective) and self.objective not in known:
            raise FleetConfigError(
                f"`objective` is {self.objective!r}, but must be one of {known} or a function."
            )
        if not self.forward_looking_s > 0:
            raise FleetConfigError(
                f"`forward_looking_s` is {self.forward_looking_s}, but must be > 0."
            )

    def allocate(self, problem: AllocationProblem) -> Plan:
        """Solves ``problem``; see :class:`Allocator`."""
        if not problem.candidates or not problem.num_devices:
            return assemble(problem, [], allocator=self.name, status="trivial")
        if self.objective == "makespan":
            wishes = makespan_wishes(problem, self.hedge)
            status, gap = "heuristic", None
        else:
            wishes, counts = self._worth_most(problem, self.objective)
            status, gap = counts.status, counts.gap
        widths = realise(problem, wishes)
        if self.objective == "makespan":  # kept for who grows later, they would be idle
            widths = fill_idle(problem, widths)
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
