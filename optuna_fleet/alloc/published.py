"""What our policies are compared with: FLEET's flotillas, one device for each, equal shares.

They decide how many devices trials get; who waits is given a device type beforehand
(:func:`optuna_fleet.alloc.draft.homes`).
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

from optuna_fleet.alloc.draft import Draft, Drawn, homes, rates_of
from optuna_fleet.alloc.placement import plan_of
from optuna_fleet.alloc.problem import AllocationProblem, Candidate, Plan
from optuna_fleet.alloc.streams import demand, flotillas_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleDeviceAllocator:
    """FLEET's baseline (section 6.1): each trial alone on one device, with its own preprocessing.

    A free device takes any trial that waits, at random; whoever flies stays, on as many devices
    as it has. A trial that can't fly on one device gets as few as it can. Decide whenever a
    device is free. Where the preprocessors' capacity counts, each trial draws a stream of its own.

    Attributes:
        seed: Draws the order of the trials. Each one's place in it depends on the seed and its
            number only.
    """

    seed: int = 0
    name: str = field(default="baseline", init=False)

    def allocate(self, problem: AllocationProblem) -> Plan:
        """Solves ``problem``; see :class:`Allocator`. Never fails."""
        draft = _at_random(problem, self.seed, lambda _, rates: sum(rates.values()))
        made = draft.at_least_one()
        groups = [[number] for number in sorted(made.choice)]
        return plan_of(problem, made, groups=groups, allocator=self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class HomogeneousAllocator:
    """Pittman et al. (SC 2018): one device per trial, and all share one stream.

    As many trials as there are free devices are picked at random, whoever flies stays; a trial
    that can't fly on one device gets as few as it can. Use it with rounds that end when all of
    their trials have ended, and with ``rate_spread=math.inf``: it knows no bound on rates. With a
    bound, or phases, it takes as many streams as those need.
    """

    seed: int = 0
    name: str = field(default="homogeneous", init=False)

    def allocate(self, problem: AllocationProblem) -> Plan:
        """Solves ``problem``; see :class:`Allocator`. Never fails."""
        draft = _at_random(problem, self.seed, demand)
        return plan_of(problem, draft.at_least_one(), allocator=self.name)


def _at_random(problem: AllocationProblem, seed: int, drawn: Drawn) -> Draft:
    def turn(candidate: Candidate) -> tuple[bool, float, int]:
        # A text is hashed whole: neighbouring seeds and numbers give unrelated draws.
        place_in_order = random.Random(f"{seed}/{candidate.number}").random()
        is_new = problem.kept_width(candidate) is None
        return is_new, place_in_order if is_new else 0.0, candidate.number

    draft, on = Draft(problem, drawn), homes(problem)
    for c in sorted(problem.candidates, key=turn):
        if c.number not in problem.pinned:
            kept = problem.kept_width(c)
            if not (kept and draft.give(c.number, on[c.number], kept)):
                draft.give(c.number, on[c.number], c.min_devices)
    return draft


# -- FLEET ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetAllocator:
    """One flotilla per decision, by Algorithm 2 of FLEET (MLSys 2020, section 4.3.2, appendix A).

    The fastest trial on one device is the reference; trials join on the width that brings them
    closest to its rate (Eq. 3), as long as one comes within ``delta``; devices left over go to the
    slowest member. All others wait. For FLEET-G, decide when a round ends, with every
    trial able to move. For FLEET-L (section 4.3.3), decide at each end of a trial with only the
    freed devices in the problem, or with the flying trials as ones that can't move: they keep
    their places in flotillas of their own, and the freed devices get a flotilla by themselves.

    Where the pseudo-code is silent or harmful: a trial that needs several devices counts by its
    rate on the fewest; Eq. 3 looks at the rising branch of r(m) only; of equally close ones fewer
    devices come first, then the lower number; devices that would raise no rate are left over.

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
        flotilla = _Flotilla(problem)
        flotilla.open()
        flotilla.join(self.delta)
        flotilla.speed_up()
        made = flotilla.draft.at_least_one()
        own = sorted(made.choice.keys() - problem.pinned.keys())
        groups = [*flotilla.others, *([own] if own else [])]
        return plan_of(problem, made, groups=groups, allocator=self.name)


class _Flotilla:
    """The new one, under construction beside those of trials that can't move.

    Attributes:
        others: Those. The problem does not say who shares a stream with whom: as few as can be.
        rates: Of its members, in samples/s.
        draft: All that is given.
    """

    def __init__(self, problem: AllocationProblem) -> None:
        self.rates: dict[int, float] = {}
        self.draft = Draft(problem, self._drawn)
        staying = rates_of(problem, self.draft.choice)
        self.others = flotillas_of(problem, staying)
        self._drawn_by_others = demand(problem, staying)
        self._problem, self._homes = problem, homes(problem)
        waiting = (c for t, c in problem.by_number.items() if t not in problem.pinned)
        self._pool = {c.number: c.as_on(self._homes[c.number]) for c in waiting}

    def open(self) -> None:
        """Begins with the fastest trial that it can (Alg. 2, lines 1 and 2)."""
        fastest_first = sorted(self._pool.values(), key=lambda c: -c.rate(c.min_devices))
        next((c for c in fastest_first if self._takes(c, c.min_devices)), None)

    def join(self, delta: float) -> None:
        """Adds members, the closest to the first one's rate first (Eq. 3; lines 3 to 11)."""
        if not self.rates:
            return
        (first, fastest), *_ = self.rates.items()
        phase = self._pool[first].epochs_done
        options = sorted(
            (abs(c.rate(m) - fastest), m, c.number)
            for c in self._pool.values()
            if c.epochs_done == phase or not self._problem.phases
            for m in c.useful_widths(self._problem.num_devices)
            if abs(c.rate(m) - fastest) <= delta
        )
        for _, m, number in options:
            if number not in self.rates:
                self._takes(self._pool[number], m)

    def speed_up(self) -> None:
        """Gives devices left over to the slowest member (lines 12 to 16)."""
        while self.rates:
            slowest = self._pool[min(self.rates, key=lambda t: (self.rates[t], t))]
            now = sum(self.draft.choice[slowest.number].values())
            widths = slowest.useful_widths(self._problem.num_devices)
            wider = widths[bisect_right(widths, now) :][:1]
            if not wider or not self._takes(slowest, *wider):
                return

    def _takes(self, candidate: Candidate, m: int) -> bool:
        rates = {**self.rates, candidate.number: candidate.rate(m)}
        if max(rates.values()) > min(rates.values()) * self._problem.rate_spread:
            return False
        if not self.draft.give(candidate.number, self._homes[candidate.number], m):
            return False
        self.rates = rates
        return True

    def _drawn(self, _: AllocationProblem, rates: Mapping[int, float]) -> float:
        own = [rate for number, rate in rates.items() if number not in self._problem.pinned]
        return self._drawn_by_others + max(own, default=0.0)


# -- equal shares ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualSplitAllocator:
    """The heuristic that BFTrainer is compared with (section 5.1).

    Every trial gets the same number of devices, what is left over goes one by one to the first.

    Attributes:
        published: Follow the published simulator, which gives nobody a share that is not above the
            minimum, and all that is left over to the first trials, up to their maximum.
    """

    published: bool = False
    name: str = field(default="equal-split", init=False)

    def allocate(self, problem: AllocationProblem) -> Plan:
        """Solves ``problem``; see :class:`Allocator`. Never fails."""
        draft, on = Draft(problem), homes(problem)
        shares = self._shares(problem, on)
        widths: dict[int, int] = {}

        def widen(candidate: Candidate, most: int) -> None:
            number = candidate.number
            fewest = max(widths.get(number, 0) + 1, candidate.min_devices)
            for m in range(most, fewest - 1, -1):
                if draft.give(number, on[number], m):
                    widths[number] = m
                    return

        movable = [c for t, c in problem.by_number.items() if t not in problem.pinned]
        for c in movable:  # who shrinks makes room first
            widen(c, min(shares[c.number], problem.kept_width(c) or 0))
        for c in sorted(movable, key=lambda c: (c.number not in widths, not shares[c.number])):
            # No device is to be idle because those who could have it wait.
            least = 0 if self.published else c.min_devices
            widen(c, shares[c.number] or least)
        return plan_of(problem, draft.at_least_one(), allocator=self.name)

    def _shares(self, problem: AllocationProblem, on: Mapping[int, str]) -> dict[int, int]:
        """Devices that each trial is to have, if all can move."""
        shares = {c.number: problem.kept_width(c) or 0 for c in problem.candidates}  # of mixtures
        for kind, total in problem.num_by_kind.items():
            own = [c for t, c in problem.by_number.items() if on[t] == kind]
            share = total // max(1, len(own))
            for c in own:
                is_enough = share >= c.min_devices + self.published
                shares[c.number] = min(share, c.widest) if is_enough else 0
            left, was_left = total - sum(shares[c.number] for c in own), 0
            while left != was_left:  # one pass is not enough where some are at their widest
                was_left = left
                for c in own:
                    left -= self._widen(c, shares, left)
        return shares

    def _widen(self, candidate: Candidate, shares: dict[int, int], left: int) -> int:
        """Gives a trial some of what is left over; says how many."""
        share = shares[candidate.number]
        extra = left if self.published else max(1, candidate.min_devices - share)
        wider = min(share + min(extra, left), candidate.widest)
        if wider < candidate.min_devices:
            return 0
        shares[candidate.number] = wider
        return wider - share
