"""FLEET's greedy flotillas: as published, and as a fallback.

Sources: FLEET (MLSys 2020), section 4.3.2, Eq. 3 and 4, Algorithms 2 and 3 of appendix A. Readings
where the pseudo-code is silent or harmful:

- A trial that needs several devices counts by its rate on the fewest it can fly on.
- Eq. 3 looks at the rising branch of r(m) only; beyond its peak (Eq. 5 has one) the same rate
  costs more devices.
- Equally close ones: fewer devices first, then the lower trial number.
- Lines 12 to 16 give every device left over to the slowest member. Here that stops where further
  ones would not raise its rate, instead of slowing the whole flotilla down.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from optuna_fleet.alloc.assembly import assemble, staying
from optuna_fleet.alloc.problem import AllocationProblem, Candidate, Plan
from optuna_fleet.alloc.streams import Widths, affordable, group_widths, stream_limit

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyAllocator:
    """Packs trials around the fastest one, then speeds up the slowest (FLEET, Algorithm 2).

    The fastest trial on one device is the reference. Trials join on the width that brings them
    closest to it (Eq. 3), then devices left over go to the slowest member. While devices and
    trials are left, a further flotilla is formed from them, and devices that are still left go to
    any trial that gains. Trials that can't move keep their places, and others may join them. What
    the preprocessors could not serve does not start.

    Attributes:
        keep_flying: Let trials fly on at their width, and decide about the rest only. For use as a
            fallback, where upsetting everything would cost more than it gains.
    """

    keep_flying: bool = False
    name: str = field(default="greedy", init=False)

    def allocate(self, problem: AllocationProblem) -> Plan:
        """Solves ``problem``; see :class:`Allocator`. Never fails."""
        builder = FlotillaBuilder(problem)
        kept = staying(problem) if self.keep_flying else problem.pinned
        builder.groups.extend(group_widths(problem, kept))
        for group in builder.groups:
            builder.join(group)
        while (seed := builder.fastest()) is not None:
            group = builder.open(seed)
            builder.join(group)
            builder.speed_up(group)
        builder.spend_rest()
        return assemble(problem, builder.groups, allocator=self.name, status="heuristic")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetAllocator:
    """One flotilla per decision by FLEET's Algorithm 2, placed by its Algorithm 3.

    The fastest trial on one device is the reference; trials join on the width that brings them
    closest to its rate (Eq. 3), as long as one comes within ``delta``; devices left over go to the
    slowest member. All others wait. For FLEET-G, decide when a round ends, with every
    trial able to move. For FLEET-L (section 4.3.3), decide at each end of a trial with only the
    freed devices in the problem, or with the flying trials as ones that can't move: they keep
    their places in flotillas of their own, and the freed devices get a flotilla by themselves.

    FLEET bounds a flotilla's rates by ``delta`` alone: use it with ``rate_spread=math.inf``. A
    finite bound, phases and the preprocessors' capacity, which FLEET does not know, are kept to
    where the problem sets them: what would break them does not join.

    Attributes:
        delta: How far from the reference a member's rate may be, in samples/s, an absolute number
            as published (FLEET: 20).
    """

    delta: float = 20.0
    name: str = field(default="fleet-g", init=False)

    def allocate(self, problem: AllocationProblem) -> Plan:
        """Solves ``problem``; see :class:`Allocator`. Never fails."""
        builder = FlotillaBuilder(problem, delta=self.delta)
        # The problem does not say who shares a stream with whom: the fewest flotillas it takes.
        builder.groups.extend(group_widths(problem, problem.pinned))
        if (reference := builder.fastest()) is not None:
            flotilla = builder.open(reference)
            builder.join(flotilla)
            builder.speed_up(flotilla)
        return assemble(problem, builder.groups, allocator=self.name, status="heuristic")


class FlotillaBuilder:
    """Flotillas under construction.

    Args:
        problem: Whose trials, devices and rules they must keep to.
        delta: How far from the reference rate a trial may join, in samples/s. The problem's
            ``rate_spread`` always counts.
    """

    def __init__(self, problem: AllocationProblem, *, delta: float = math.inf) -> None:
        self.groups: list[Widths] = []
        self._problem = problem
        self._by_number = problem.by_number
        self._limit = stream_limit(problem)
        self._delta = delta

    @property
    def _free(self) -> int:
        """Devices not given away."""
        return self._problem.num_devices - sum(m for group in self.groups for m in group.values())

    @property
    def _pool(self) -> list[Candidate]:
        """Trials in no flotilla, in the order of their numbers."""
        flying = {t for group in self.groups for t in group}
        return [c for t, c in self._by_number.items() if t not in flying]

    def fastest(self) -> Candidate | None:
        """Reference of the next flotilla (Alg. 2, line 1): the fastest that could open one."""
        drawn, free = self._drawn(), self._free
        fitting = [
            c
            for c in self._pool
            if c.min_devices <= free and affordable(drawn + c.rate(c.min_devices), self._limit)
        ]
        return max(fitting, key=lambda c: (c.rate(c.min_devices), -c.number), default=None)

    def open(self, seed: Candidate) -> Widths:
        """A new flotilla around ``seed`` (line 2)."""
        self.groups.append({seed.number: seed.min_devices})
        return self.groups[-1]

    def join(self, group: Widths) -> None:
        """Adds members while one is close enough to the fastest of ``group`` (lines 3-11).

        All trials and widths are tried once, the closest first (Eq. 3): what can't join now can't
        later, with fewer devices left and rates in the group that are further apart.
        """
        free, drawn, rates = self._free, self._drawn(but=group), self._rates(group)
        slowest, fastest = min(rates), max(rates)
        for _, m, number in self._by_distance(group, slowest, fastest):
            rate = self._by_number[number].rate(m)
            low, high = min(slowest, rate), max(fastest, rate)
            if number not in group and m <= free and self._may_be(low, high, drawn):
                group[number] = m
                free, slowest, fastest = free - m, low, high

    def speed_up(self, group: Widths) -> None:
        """Gives devices left over to the slowest member (lines 12-16)."""
        while True:
            slowest = min(group, key=lambda t: (self._by_number[t].rate(group[t]), t))
            wider = next_width(self._by_number[slowest], group[slowest], self._free)
            if wider is None or not self._admits(group, {slowest: wider}):
                return
            group[slowest] = wider

    def spend_rest(self) -> None:
        """Gives devices still left to anyone who gains."""
        for group in self.groups:
            movable = {t: m for t, m in group.items() if t not in self._problem.pinned}
            admits = partial(self._admits, group)
            group.update(grow(self._by_number, movable, self._free, admits))

    def _admits(self, group: Widths, changed: Mapping[int, int]) -> bool:
        """Whether members of ``group`` may get these widths."""
        rates = self._rates({**group, **changed})
        return self._may_be(min(rates), max(rates), self._drawn(but=group))

    def _may_be(self, slowest: float, fastest: float, drawn: float) -> bool:
        """Whether rates are close, and can be served beside flotillas that draw ``drawn``."""
        is_close = fastest <= slowest * self._problem.rate_spread
        return is_close and affordable(drawn + fastest, self._limit)

    def _by_distance(
        self, group: Widths, slowest: float, fastest: float
    ) -> list[tuple[float, int, int]]:
        """Distance to the fastest rate, width and number of whatever may be close enough."""
        spread = self._problem.rate_spread
        least = max(fastest / spread, fastest - self._delta) * (1 - _ROUNDING)
        most = min(slowest * spread, fastest + self._delta) * (1 + _ROUNDING)
        phases = {self._by_number[t].epochs_done for t in group}
        found = []
        for c in self._pool:
            if self._problem.phases and c.epochs_done not in phases:
                continue
            widths = c.useful_widths(self._problem.num_devices)
            start = bisect_left(widths, least, key=c.rate)
            end = bisect_right(widths, most, key=c.rate)
            found += [(abs(c.rate(m) - fastest), m, c.number) for m in widths[start:end]]
        return sorted(option for option in found if option[0] <= self._delta)

    def _drawn(self, but: Widths | None = None) -> float:
        """What the streams of all flotillas ``but`` one draw; 0 where that does not matter."""
        if math.isinf(self._limit):
            return 0.0
        return sum(max(self._rates(group)) for group in self.groups if group is not but)

    def _rates(self, group: Mapping[int, int]) -> list[float]:
        return [self._by_number[t].rate(m) for t, m in group.items()]


def grow(
    by_number: Mapping[int, Candidate],
    widths: Mapping[int, int],
    free: int,
    admissible: Callable[[Widths], bool],
) -> Widths:
    """Spends up to ``free`` more devices, always on the slowest trial that gains from them.

    Args:
        by_number: Candidates by trial number.
        widths: Trial number -> devices it has.
        free: Devices left over.
        admissible: Says whether the widths after a step may be; a step that may not be is passed
            over.
    """
    grown = dict(widths)
    while free > 0:
        for number in sorted(grown, key=lambda t: (by_number[t].rate(grown[t]), t)):
            wider = next_width(by_number[number], grown[number], free)
            if wider is not None and admissible({**grown, number: wider}):
                free -= wider - grown[number]
                grown[number] = wider
                break
        else:
            break
    return grown


def next_width(candidate: Candidate, m: int, free: int) -> int | None:
    """Narrowest width above ``m`` that is faster and costs at most ``free`` more devices."""
    widths = candidate.useful_widths(m + free)
    wider = widths[bisect_right(widths, m) :]
    return next((w for w in wider if candidate.rate(w) > candidate.rate(m)), None)
