"""FLEET's greedy flotillas (Algorithm 2), as yardstick and fallback."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from optuna_fleet.alloc.assembly import assemble, grow, next_width, staying
from optuna_fleet.alloc.problem import AllocationProblem, Candidate, Plan
from optuna_fleet.alloc.streams import Widths, affordable, group_widths, stream_limit


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyAllocator:
    """Packs trials around the fastest one, then speeds up the slowest (FLEET, Algorithm 2).

    The fastest trial on one device is the reference. Trials join on the width that brings them
    closest to it (Eq. 3), then devices left over go to the slowest member. Readings where the
    pseudo-code is silent or harmful: only widths faster than every narrower one are looked at; the
    slowest member gets further devices only while that raises its rate and keeps the spread; ties
    go to fewer devices, then to the lower trial number. While devices and trials are left, a
    further flotilla is formed from them, and devices that are still left go to any trial that
    gains. Trials that can't move keep their places, and others may join them. What the
    preprocessors could not serve does not start.

    Attributes:
        delta: A trial may join if its rate is within ``delta`` samples/s of the reference (FLEET:
            20); None if only the problem's ``rate_spread`` counts, which always does.
        keep_flying: Let trials fly on at their width, and decide about the rest only. For use as a
            fallback, where upsetting everything would cost more than it gains.
    """

    delta: float | None = None
    keep_flying: bool = False
    name: str = field(default="greedy", init=False)

    def allocate(self, problem: AllocationProblem) -> Plan:
        """Solves ``problem``; see :class:`Allocator`. Never fails."""
        builder = FlotillaBuilder(problem, delta=self.delta)
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


class FlotillaBuilder:
    """Flotillas under construction.

    Args:
        problem: Whose trials, devices and rules they must keep to.
        delta: How far from the reference rate a trial may join, in samples/s; None for any rate
            that the problem's ``rate_spread`` admits, which always counts.
    """

    def __init__(self, problem: AllocationProblem, *, delta: float | None) -> None:
        self.groups: list[Widths] = []
        self._by_number = problem.by_number
        self._pinned = problem.pinned
        self._num_devices = problem.num_devices
        self._spread = problem.rate_spread
        self._phases = problem.phases
        self._limit = stream_limit(problem)
        self._delta = delta

    @property
    def free(self) -> int:
        """Devices not given away."""
        return self._num_devices - sum(m for group in self.groups for m in group.values())

    @property
    def pool(self) -> list[Candidate]:
        """Trials in no flotilla, in the order of their numbers."""
        flying = {t for group in self.groups for t in group}
        return [c for t, c in self._by_number.items() if t not in flying]

    @property
    def references(self) -> list[Candidate]:
        """Trials that could open a flotilla, slowest first, of equals the lower number last."""
        drawn, free = self._drawn(), self.free
        fitting = [
            c
            for c in self.pool
            if c.min_devices <= free and affordable(drawn + c.rate(c.min_devices), self._limit)
        ]
        return sorted(fitting, key=lambda c: (c.rate(c.min_devices), -c.number))

    def fastest(self) -> Candidate | None:
        """Reference of the next flotilla (Alg. 2, line 1)."""
        return next(reversed(self.references), None)

    def open(self, seed: Candidate) -> Widths:
        """A new flotilla around ``seed`` (line 2)."""
        self.groups.append({seed.number: seed.min_devices})
        return self.groups[-1]

    def join(self, group: Widths) -> None:
        """Adds members while one is close enough to the fastest of ``group`` (lines 3-11)."""
        reference = max(self._rates(group))
        while (best := self._find_next(group, reference)) is not None:
            number, m = best
            group[number] = m

    def speed_up(self, group: Widths) -> None:
        """Gives devices left over to the slowest member (lines 12-16)."""
        while True:
            slowest = self.slowest(group)
            wider = next_width(self._by_number[slowest], group[slowest], self.free)
            if wider is None or not self.admits(group, {slowest: wider}):
                return
            group[slowest] = wider

    def spend_rest(self) -> None:
        """Gives devices still left to anyone who gains."""
        for group in self.groups:
            movable = {t: m for t, m in group.items() if t not in self._pinned}

            def is_admissible(changed: Widths, group: Widths = group) -> bool:
                return self.admits(group, changed)

            group.update(grow(self._by_number, movable, self.free, is_admissible))

    def slowest(self, group: Widths) -> int:
        """Number of the slowest member, of equals the lowest."""
        return min(group, key=lambda t: (self._by_number[t].rate(group[t]), t))

    def admits(self, group: Widths, changed: Mapping[int, int]) -> bool:
        """Whether ``group`` may get these widths and members.

        The rates must stay close, the phase must stay one, and the preprocessors must be able to
        serve all flotillas.
        """
        members = {**group, **changed}
        rates = self._rates(members)
        if max(rates) > min(rates) * self._spread:
            return False
        if self._phases and len({self._by_number[t].epochs_done for t in members}) > 1:
            return False
        return affordable(self._drawn(but=group) + max(rates), self._limit)

    def _find_next(self, group: Widths, reference: float) -> tuple[int, int] | None:
        """Eq. 3: the trial and width closest to the reference rate."""
        found = []
        free = self.free
        for candidate in self.pool:
            for m in candidate.useful_widths(free):
                distance = abs(candidate.rate(m) - reference)
                close = self._delta is None or distance <= self._delta
                if close and self.admits(group, {candidate.number: m}):
                    found.append((distance, m, candidate.number))
        if not found:
            return None
        _, m, number = min(found)
        return number, m

    def _drawn(self, but: Widths | None = None) -> float:
        """What the streams of all flotillas ``but`` one draw; 0 where that does not matter."""
        if math.isinf(self._limit):
            return 0.0
        return sum(max(self._rates(group)) for group in self.groups if group is not but)

    def _rates(self, group: Mapping[int, int]) -> list[float]:
        return [self._by_number[t].rate(m) for t, m in group.items()]
