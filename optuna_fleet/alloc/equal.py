"""Equal split: the heuristic that BFTrainer is compared with (section 5.1)."""

from __future__ import annotations

from dataclasses import dataclass, field

from optuna_fleet.alloc.adjust import Wishes, place_changes, realise
from optuna_fleet.alloc.assembly import assemble
from optuna_fleet.alloc.problem import AllocationProblem, Candidate, Plan
from optuna_fleet.alloc.streams import Widths, group_widths


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualSplitAllocator:
    """Every trial gets the same number of devices, what is left over goes one by one to the first.

    Attributes:
        published: Follow the published simulator, which gives nobody a share that is not above the
            minimum, and all that is left over to the first trials, up to their maximum.
    """

    published: bool = False
    name: str = field(default="equal-split", init=False)

    def allocate(self, problem: AllocationProblem) -> Plan:
        """Solves ``problem``; see :class:`Allocator`. Never fails."""
        wishes = Wishes(widths=self._shares(problem), pays=lambda candidate, now, m: True)
        widths = realise(problem, wishes)
        return assemble(
            problem,
            group_widths(problem, widths),
            placement=place_changes(problem, widths),
            allocator=self.name,
            status="heuristic",
        )

    def _shares(self, problem: AllocationProblem) -> Widths:
        candidates = list(problem.by_number.values())
        share = problem.num_devices // max(1, len(candidates))
        targets = {c.number: self._share(c, share) for c in candidates}
        left = problem.num_devices - sum(targets.values())
        was_left = None
        while left and left != was_left:  # one pass is not enough where some are at their widest
            was_left = left
            for candidate in candidates:
                left -= self._widen(candidate, targets, left)
        return targets

    def _widen(self, candidate: Candidate, targets: Widths, left: int) -> int:
        """Give a trial some of what is left over; return how many."""
        target = targets[candidate.number]
        extra = left if self.published else max(1, candidate.min_devices - target)
        wider = min(target + min(extra, left), candidate.widest)
        if wider < candidate.min_devices:
            return 0
        targets[candidate.number] = wider
        return wider - target

    def _share(self, candidate: Candidate, share: int) -> int:
        least = candidate.min_devices + self.published
        return min(share, candidate.widest) if share >= least else 0
