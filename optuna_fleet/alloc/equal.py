"""Equal split: the heuristic that BFTrainer is compared with (section 5.1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from optuna_fleet.alloc.adjust import place_changes
from optuna_fleet.alloc.assembly import assemble, on_one_type
from optuna_fleet.alloc.problem import AllocationProblem, Candidate, Plan
from optuna_fleet.alloc.streams import Widths, group_widths, serves


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
        shares = self._shares(problem)
        # No device is to be idle because those who could have it wait.
        least = {c.number: 0 if self.published else c.min_devices for c in problem.candidates}
        widths = _as_far_as_possible(problem, shares, least)
        return assemble(
            problem,
            group_widths(problem, widths),
            placement=place_changes(problem, on_one_type(problem, widths)),
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


def _as_far_as_possible(
    problem: AllocationProblem, shares: Mapping[int, int], least: Mapping[int, int]
) -> Widths:
    """What can be done now: who can't move keeps its width, and who shrinks makes room first.

    Whoever has no share gets the ``least``, if devices are left.

    What the preprocessors could not serve gets less, or nothing. If that leaves nobody, the
    slowest trial flies: see :func:`optuna_fleet.alloc.streams.stream_limit`.
    """
    widths = dict(problem.pinned)
    is_served = serves(problem)
    movable = [c for c in problem.by_number.values() if c.number not in widths]
    now = {c.number: problem.kept_width(c) or 0 for c in movable}

    def widen(candidate: Candidate, limit: int) -> None:
        fewest = max(widths.get(candidate.number, 0) + 1, candidate.min_devices)
        for m in range(limit, fewest - 1, -1):
            if is_served({**widths, candidate.number: m}):
                widths[candidate.number] = m
                return

    for candidate in movable:
        widen(candidate, min(shares[candidate.number], now[candidate.number]))
    for candidate in sorted(movable, key=lambda c: (c.number not in widths, not shares[c.number])):
        free = problem.num_devices - sum(widths.values())
        most = widths.get(candidate.number, 0) + free
        widen(candidate, min(shares[candidate.number] or least[candidate.number], most))
    return widths or _slowest(problem)


def _slowest(problem: AllocationProblem) -> Widths:
    fitting = [c for c in problem.by_number.values() if c.min_devices <= problem.num_devices]
    slowest = min(fitting, key=lambda c: c.rate(c.min_devices), default=None)
    return {slowest.number: slowest.min_devices} if slowest else {}
