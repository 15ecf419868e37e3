"""FLEET's own policy, FLEET-G, as published: the yardstick for every other allocator.

Sources: FLEET (MLSys 2020), section 4.3.2, Eq. 3 and 4, Algorithms 2 and 3 of appendix A. Where
the pseudo-code is silent or harmful, the readings are named at the place they are used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from optuna_fleet.alloc.assembly import assemble
from optuna_fleet.alloc.greedy import FlotillaBuilder
from optuna_fleet.alloc.problem import AllocationProblem, Candidate, Plan
from optuna_fleet.alloc.streams import Widths, group_widths


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetAllocator:
    """One flotilla per decision by FLEET's Algorithm 2, placed by its Algorithm 3.

    The fastest trial on one device is the reference; trials join on the width that brings them
    closest to its rate (Eq. 3), as long as one comes within ``delta``; devices left over go to the
    slowest member, one by one. All others wait. For FLEET-G, decide when a round ends, with every
    trial able to move. For FLEET-L (section 4.3.3), decide at each end of a trial with only the
    freed devices in the problem, or with the flying trials as ones that can't move: they keep
    their places in flotillas of their own, and the freed devices get a flotilla by themselves.

    FLEET bounds a flotilla's rates by ``delta`` alone: use it with ``rate_spread=math.inf``. A
    finite bound, phases and the preprocessors' capacity, which FLEET does not know, are kept to
    where the problem sets them: what would break them does not join.

    Readings:
        - A trial that needs several devices counts by its rate on the fewest it can fly on.
        - Eq. 3 looks at the rising branch of r(m) only; beyond its peak (Eq. 5 has one) the same
          rate costs more devices.
        - Equally close ones: fewer devices first, then the lower trial number.
        - Lines 12 to 16 give every device left over to the slowest member. Here that stops where
          a further one would not raise its rate, instead of slowing the whole flotilla down.

    Attributes:
        delta: How far from the reference a member's rate may be, in samples/s, an absolute number
            as published (FLEET: 20).
        reference_quantile: Which trial is the reference, as a quantile of the rates on one device
            (nearest rank): 1 for the fastest, as published. The fastest forces wide widths on
            the others; 0.75 did better in simulation.

    Raises:
        ValueError: ``delta`` is negative, or ``reference_quantile`` not within 0 and 1.
    """

    delta: float = 20.0
    reference_quantile: float = 1.0
    name: str = field(default="fleet-g", init=False)

    def __post_init__(self) -> None:
        if not self.delta >= 0:
            raise ValueError(f"The value of `delta` is {self.delta}, but must be >= 0.")
        if not 0 <= self.reference_quantile <= 1:
            raise ValueError(
                f"The value of `reference_quantile` is {self.reference_quantile}, but must be "
                "within 0 and 1."
            )

    def allocate(self, problem: AllocationProblem) -> Plan:
        """Solves ``problem``; see :class:`Allocator`. Never fails."""
        builder = FlotillaBuilder(problem, delta=self.delta)
        # The problem does not say who shares a stream with whom: the fewest flotillas it takes.
        builder.groups.extend(group_widths(problem, problem.pinned))
        if (reference := self._reference(builder.references)) is not None:
            flotilla = builder.open(reference)
            builder.join(flotilla)
            _give_left_over(problem, builder, flotilla)
        return assemble(problem, builder.groups, allocator=self.name, status="heuristic")

    def _reference(self, candidates: list[Candidate]) -> Candidate | None:
        if not candidates:
            return None
        # Nearest rank; the small number keeps 0.07 * 100 from becoming the 8th.
        rank = math.ceil(self.reference_quantile * len(candidates) - 1e-9)
        return candidates[max(rank, 1) - 1]


def _give_left_over(
    problem: AllocationProblem, builder: FlotillaBuilder, flotilla: Widths
) -> None:
    by_number = problem.by_number
    while builder.free > 0:
        slowest = builder.slowest(flotilla)
        candidate, m = by_number[slowest], flotilla[slowest]
        if m == candidate.widest or candidate.rate(m + 1) <= candidate.rate(m):
            return
        if not builder.admits(flotilla, {slowest: m + 1}):
            return
        flotilla[slowest] = m + 1
