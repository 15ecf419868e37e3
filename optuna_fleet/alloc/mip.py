"""Rounds planned by the model: which trials form flotillas, so that most useful work is done."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from optuna_fleet.alloc.assembly import plan_of
from optuna_fleet.alloc.model import decide
from optuna_fleet.alloc.placement import place_choice
from optuna_fleet.alloc.problem import AllocationProblem, Candidate, Plan

_TIE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class MipAllocator:
    """Maximises useful work, counted in devices that scale perfectly: the sum of r(m) / r(1).

    Attributes:
        rescale_penalty: What stopping, moving or rescaling a flying trial must gain at least, in
            device equivalents.
        waiting_bonus: What each decision that passed over a trial adds to its value, in device
            equivalents: sooner or later it flies.
        flotilla_cost: What a further flotilla costs (another stream of preprocessing), in device
            equivalents.
    """

    rescale_penalty: float = 0.25
    waiting_bonus: float = 0.01
    flotilla_cost: float = 0.25
    name: str = field(default="mip", init=False)
    knows_types: ClassVar[bool] = True

    def allocate(self, problem: AllocationProblem) -> Plan:
        """Solves ``problem``; see :class:`Allocator`."""
        worth = partial(self._gains, problem)
        decision = decide(problem, worth, flotilla_cost=self.flotilla_cost)
        return plan_of(problem, decision, place_choice, allocator=self.name)

    def _gains(
        self, problem: AllocationProblem, candidate: Candidate, kind: str
    ) -> Iterator[tuple[int, float]]:
        extra = self.waiting_bonus * candidate.waited_rounds
        # Among equals rather more trials than wider ones, and the elder ones.
        elder = sum(number < candidate.number for number in problem.by_number)
        extra += _TIE * (1 - elder / len(problem.candidates))
        kept = problem.kept_width(candidate) if problem.kind_now(candidate) == kind else None
        alone = max(candidate.rates_on(k)[0] for k in problem.num_by_kind)
        rates = candidate.rates_on(kind)
        for m in problem.widths(candidate, kind):
            keeping = self.rescale_penalty if m == kept else 0.0
            yield m, rates[m - 1] / alone + keeping + extra
