"""Rounds of flotillas in which most useful work is done: by the model, or without a solver."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from optuna_fleet.alloc.draft import Decision
from optuna_fleet.alloc.model import decide
from optuna_fleet.alloc.placement import plan_of
from optuna_fleet.alloc.problem import AllocationProblem, Candidate, Plan
from optuna_fleet.alloc.program import Program, by_slope

_TIE = 1e-3
_STAYING = 1e6  # above anything that devices are worth
_STARTING = 1e3


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

    def allocate(self, problem: AllocationProblem) -> Plan:
        """Solves ``problem``; see :class:`Allocator`."""
        made = decide(problem, partial(self.gains, problem), flotilla_cost=self.flotilla_cost)
        return plan_of(problem, made, allocator=self.name)

    def gains(
        self, problem: AllocationProblem, candidate: Candidate, kind: str
    ) -> Iterator[tuple[int, float]]:
        """What devices of a type are worth to a trial; see `Worth`."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyAllocator:
    """The same worth without a solver: devices go step by step to where each is worth most.

    Attributes:
        keep_flying: Let trials fly on where they are, before anything else. For use as a fallback,
            where upsetting everything would cost more than it gains.
    """

    keep_flying: bool = False
    name: str = field(default="greedy", init=False)

    def allocate(self, problem: AllocationProblem) -> Plan:
        """Solves ``problem``; see :class:`Allocator`. Never fails."""
        choice, _ = by_slope(Program.of(problem, partial(self._gains, problem)))
        return plan_of(problem, Decision(choice=choice), allocator=self.name)

    def _gains(
        self, problem: AllocationProblem, candidate: Candidate, kind: str
    ) -> Iterator[tuple[int, float]]:
        kept = problem.kept_width(candidate) if self.keep_flying else None
        is_home = problem.kind_now(candidate) == kind
        for m, gain in MipAllocator().gains(problem, candidate, kind):
            if kept is None:
                yield m, gain + _STARTING * self.keep_flying
            elif is_home and m >= kept:
                yield m, gain + _STAYING


CAUTIOUS = GreedyAllocator(keep_flying=True)
"""The fallback of every policy."""
