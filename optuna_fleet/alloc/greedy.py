"""FLEET's greedy flotillas (Algorithm 2), as yardstick and fallback."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from optuna_fleet.alloc.assembly import Widths, assemble, group_widths, grow, next_width
from optuna_fleet.alloc.problem import AllocationProblem, Candidate, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyAllocator:
    """Packs trials around the fastest one, then speeds up the slowest (FLEET, Algorithm 2).

    The fastest trial on one device is the reference. Trials join on the width that brings them
    closest to it (Eq. 3), then devices left over go to the slowest member. Readings where the
    pseudo-code is silent or harmful: only widths faster than every narrower one are looked at; the
    slowest member gets further devices only while that raises its rate and keeps the spread; ties
    go to fewer devices, then to the lower trial number. While devices and trials are left, a
    further flotilla is formed from them, and devices that are still left go to any trial that
    gains.

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
        state = _State(problem, self.delta)
        state.groups.extend(self._kept(problem))
        for group in state.groups:
            state.join(group)
        while (seed := state.fastest()) is not None:
            group = {seed.number: seed.min_devices}
            state.groups.append(group)
            state.join(group)
            state.speed_up(group)
        state.spend_rest()
        return assemble(problem, state.groups, allocator=self.name, status="heuristic")

    def _kept(self, problem: AllocationProblem) -> list[Widths]:
        if not self.keep_flying:
            return []
        kept: Widths = {}
        taken: set[int] = set()
        for number, candidate in problem.by_number.items():
            m = problem.kept_width(candidate)
            fits = m is not None and candidate.min_devices <= m <= candidate.widest
            if m is not None and fits and not taken & set(candidate.devices):
                kept[number] = m
                taken.update(candidate.devices)
        return group_widths(problem, kept)


class _State:
    """Flotillas under construction."""

    def __init__(self, problem: AllocationProblem, delta: float | None) -> None:
        self.groups: list[Widths] = []
        self._by_number = problem.by_number
        self._num_devices = problem.num_devices
        self._spread = problem.rate_spread
        self._delta = delta

    @property
    def free(self) -> int:
        return self._num_devices - sum(m for group in self.groups for m in group.values())

    @property
    def pool(self) -> list[Candidate]:
        flying = {t for group in self.groups for t in group}
        return [c for t, c in self._by_number.items() if t not in flying]

    def fastest(self) -> Candidate | None:
        """Reference of the next flotilla (Alg. 2, line 1)."""
        fitting = [c for c in self.pool if c.min_devices <= self.free]
        return max(fitting, key=lambda c: (c.rate(c.min_devices), -c.number), default=None)

    def join(self, group: Widths) -> None:
        """Adds members while one is close enough (lines 3-11)."""
        reference = max(self._rates(group))
        while (best := self._find_next(group, reference)) is not None:
            number, m = best
            group[number] = m

    def speed_up(self, group: Widths) -> None:
        """Gives devices left over to the slowest member (lines 12-16)."""
        while (step := self._slowest_step(group)) is not None:
            group.update(step)

    def spend_rest(self) -> None:
        """Gives devices still left to anyone who gains."""
        for group in self.groups:
            group.update(grow(self._by_number, group, self.free, self._within_spread))

    def _find_next(self, group: Widths, reference: float) -> tuple[int, int] | None:
        """Eq. 3: the trial and width closest to the reference rate."""
        found = []
        free = self.free
        for candidate in self.pool:
            for m in candidate.useful_widths(free):
                distance = abs(candidate.rate(m) - reference)
                close = self._delta is None or distance <= self._delta
                if close and self._within_spread({**group, candidate.number: m}):
                    found.append((distance, m, candidate.number))
        if not found:
            return None
        _, m, number = min(found)
        return number, m

    def _slowest_step(self, group: Widths) -> Widths | None:
        slowest = min(group, key=lambda t: (self._by_number[t].rate(group[t]), t))
        wider = next_width(self._by_number[slowest], group[slowest], self.free)
        if wider is None or not self._within_spread({**group, slowest: wider}):
            return None
        return {slowest: wider}

    def _within_spread(self, group: Mapping[int, int]) -> bool:
        rates = self._rates(group)
        return max(rates) <= min(rates) * self._spread

    def _rates(self, group: Mapping[int, int]) -> list[float]:
        return [self._by_number[t].rate(m) for t, m in group.items()]
