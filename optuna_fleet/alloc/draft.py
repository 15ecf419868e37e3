"""Choices: how many devices of which type each trial gets, before anybody says which ones."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from optuna_fleet.alloc.problem import SEVERAL, AllocationProblem, Candidate
from optuna_fleet.alloc.streams import affordable, demand, slowest, stream_limit

Share = dict[str, int]
"""Device type -> devices, at least one; the type is "" where all are alike."""

Choice = dict[int, Share]
"""Trial number -> what it gets; who waits is not in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Who gets what.

    Attributes:
        choice: Devices of each trial that flies, those included that can't move.
        status: See `Plan`, as for the rest.
    """

    choice: Choice
    status: str = "heuristic"
    gap: float | None = None
    solver: str = ""


Drawn = Callable[[AllocationProblem, Mapping[int, float]], float]
"""What trials draw of the preprocessors, by their rates; :func:`demand` is one."""


def share_of(problem: AllocationProblem, devices: tuple[int, ...]) -> Share:
    """What these devices are."""
    return dict(Counter(problem.kind_of([device]) for device in devices))


def kind_of_share(share: Mapping[str, int]) -> str:
    """Its type, or `SEVERAL`."""
    return next(iter(share)) if len(share) == 1 else SEVERAL


def rates_of(problem: AllocationProblem, choice: Mapping[int, Share]) -> dict[int, float]:
    """Samples/s of each trial."""
    by_number = problem.by_number
    return {
        number: by_number[number].rates_on(kind_of_share(share))[sum(share.values()) - 1]
        for number, share in choice.items()
    }


class Draft:
    """A choice under construction. At first it is what trials have that can't move.

    Args:
        problem: Whose devices are given away, and whose rules count.
        drawn: What trials draw, where the preprocessors' capacity counts.

    Attributes:
        choice: What is given so far.
        free: Devices of each type that are left.
    """

    def __init__(self, problem: AllocationProblem, drawn: Drawn = demand) -> None:
        by_number = problem.by_number
        self.choice: Choice = {t: share_of(problem, by_number[t].devices) for t in problem.pinned}
        self.free = dict(problem.num_by_kind)
        for share in self.choice.values():
            for kind, m in share.items():
                self.free[kind] -= m
        self._problem = problem
        self._drawn = drawn
        self._limit = stream_limit(problem)

    def give(self, number: int, kind: str, m: int) -> bool:
        """Gives a trial so many devices, instead of what it has; says whether that can be."""
        had = self.choice.get(number, {})
        if m > sum(had.values()) + sum(self.free.values()):
            return False
        available = {k: n + had.get(k, 0) for k, n in self.free.items()}
        share = _share(self._problem, available, number, kind, m)
        if not share or not self._is_served({**self.choice, number: share}):
            return False
        self.choice[number] = share
        self.free = {k: n - share.get(k, 0) for k, n in available.items()}
        return True

    def at_least_one(self) -> Decision:
        """The choice; if nobody is in it, that of the trial that flies whatever the capacity."""
        if not self.choice and (alone := slowest(self._problem)):
            _, kind, number = alone
            self.give(number, kind, self._problem.by_number[number].min_devices)
        return Decision(choice=self.choice)

    def _is_served(self, choice: Choice) -> bool:
        if math.isinf(self._limit):
            return True
        rates = rates_of(self._problem, choice)
        return affordable(self._drawn(self._problem, rates), self._limit)


def _share(
    problem: AllocationProblem, available: Share, number: int, kind: str, m: int
) -> Share | None:
    """So many devices of that type; of a mixture rather those it has, then the fast ones."""
    if kind != SEVERAL:
        return {kind: m} if m <= available.get(kind, 0) else None
    share: Share = {}
    types = problem.types_of(number, kind)
    own = share_of(problem, problem.by_number[number].devices)
    for first in (own, available):
        for k in types:
            have = share.get(k, 0)
            taken = min(first.get(k, 0) - have, available[k] - have, m - sum(share.values()))
            if taken > 0:
                share[k] = have + taken
    if sum(share.values()) < m or len(share) == 1:  # of one type is no mixture
        return None
    is_another = len(own) > 1 and m == sum(own.values())
    # Of as many devices as it has it is worth something only as it is.
    return None if is_another and any(share.get(k, 0) < own.get(k, 0) for k in types) else share


def homes(problem: AllocationProblem) -> dict[int, str]:
    """Of which type each trial's devices are to be, for who decides about numbers only.

    Whoever flies stays on its type. Who waits goes where there is least to do; as nobody knows how
    long trials train, each has as much to do as any other. Who needs more devices than there are
    of any type gets a mixture, if it may.
    """
    totals, free = problem.num_by_kind, Draft(problem).free
    if len(totals) < 2:
        return dict.fromkeys(problem.by_number, next(iter(totals), ""))
    load = dict.fromkeys(totals, 0.0)
    found: dict[int, str] = {}

    def slowness(candidate: Candidate, kind: str) -> float:
        """How many times longer it takes there than on the type that suits it best."""
        return max(candidate.rates_on(k)[0] for k in totals) / candidate.rates_on(kind)[0]

    def after(candidate: Candidate, kind: str) -> tuple[bool, bool, float]:
        least, busy = candidate.min_devices, load[kind] + slowness(candidate, kind)
        return least > totals[kind], least > free[kind], busy / max(totals[kind], 1)

    def stays_on(candidate: Candidate) -> str:
        now = problem.kind_now(candidate)
        stays = candidate.number in problem.pinned or candidate.min_devices <= totals.get(now, 0)
        return now if stays or (now and problem.kept_width(candidate)) else ""

    # Those who gain most by the right type choose first.
    gains = {c.number: max(slowness(c, kind) for kind in totals) for c in problem.candidates}
    for c in sorted(problem.by_number.values(), key=lambda c: (not stays_on(c), -gains[c.number])):
        kind = stays_on(c) or min(load, key=lambda k: after(c, k))
        if not stays_on(c) and c.spans_types and c.min_devices > max(totals.values()):
            kind = SEVERAL
        found[c.number] = kind
        if kind != SEVERAL:
            load[kind] += slowness(c, kind)
            free[kind] -= 0 if c.number in problem.pinned else c.min_devices
    return found
