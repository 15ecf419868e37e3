"""Fleets of several device types, for allocators that know of one: the published ones.

Whoever flies stays on its type. Who waits is planned for on the type where there is least to do;
so each type is an ordinary problem. Trials that need devices of several types come first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from optuna_fleet.alloc.adjust import place_changes
from optuna_fleet.alloc.assembly import assemble
from optuna_fleet.alloc.greedy import GreedyAllocator
from optuna_fleet.alloc.problem import (
    SEVERAL,
    AllocationProblem,
    Allocator,
    Candidate,
    Flotilla,
    Plan,
)
from optuna_fleet.alloc.shares import Choice, groups_of, pinned_choice, share_of
from optuna_fleet.alloc.streams import affordable, slowest, stream_limit

Kinds = dict[int, str]
"""Trial number -> device type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ByKind:
    """An :class:`Allocator` of one device type, for fleets of several as well.

    Attributes:
        inner: Decides for one type, and sees problems without types; or, if it says so by an
            attribute ``knows_types``, for all at once.
    """

    inner: Allocator

    @property
    def name(self) -> str:
        """Name of the inner allocator."""
        return self.inner.name

    def allocate(self, problem: AllocationProblem) -> Plan:
        """Solves ``problem``; see :class:`Allocator`.

        Raises:
            AllocationFailed: The inner allocator has no answer.
        """
        if not problem.kinds or getattr(self.inner, "knows_types", False):
            return self.inner.allocate(problem)
        mixtures = _plan_of(problem, _mixtures(problem), self.name)
        mixed = _served(problem, mixtures.flotillas)
        plans = {SEVERAL: mixtures} if mixed else {}
        rest = _without(problem, mixed)
        kinds = _kinds(rest, problem)
        for kind in rest.num_by_kind:
            part = _part(rest, kind, (t for t, k in kinds.items() if k == kind))
            if part.candidates or part.num_devices:
                plans[kind] = self.inner.allocate(part)
        others = [f for kind, plan in plans.items() if kind != SEVERAL for f in plan.flotillas]
        flotillas = _served(problem, [*mixed, *sorted(others, key=lambda f: f.stream_rate)])
        if not flotillas and (alone := slowest(problem)):
            _, kind, number = alone
            plans = {kind: self._alone(problem, kind, number)}
            flotillas = list(plans[kind].flotillas)
        return replace(_merged(self.name, plans), flotillas=tuple(flotillas))

    def _alone(self, problem: AllocationProblem, kind: str, number: int) -> Plan:
        if kind != SEVERAL:
            return self.inner.allocate(_part(problem, kind, [number]))
        kinds, least = problem.types_of(number, kind), problem.by_number[number].min_devices
        return _plan_of(problem, {number: _spread(problem.num_by_kind, kinds, least)}, self.name)


def _kinds(problem: AllocationProblem, whole: AllocationProblem) -> Kinds:
    """Types that trials are on, or where devices are free, or have the least to do.

    As nobody knows how long trials train, each has as much to do as any other. In the `whole`
    problem they still have the devices that mixtures took.
    """
    kinds: Kinds = {}
    load, free = dict.fromkeys(problem.num_by_kind, 0.0), dict(problem.num_by_kind)

    def home(candidate: Candidate) -> str:
        was = whole.kind_now(whole.by_number[candidate.number])
        has_room = problem.num_by_kind.get(was, 0) >= candidate.min_devices
        return problem.kind_now(candidate) or was * has_room

    def gains(candidate: Candidate) -> float:
        return max(_slowness(problem, candidate, kind) for kind in load)

    def after(candidate: Candidate, kind: str) -> tuple[bool, bool, float]:
        total = problem.num_by_kind[kind]
        busy = load[kind] + _slowness(problem, candidate, kind)
        least = candidate.min_devices
        return least > total, least > free[kind], busy / max(total, 1)

    # Those who gain most by the right type choose first.
    order = sorted(problem.by_number.values(), key=lambda c: (not home(c), -gains(c)))
    for candidate in order:
        kind = home(candidate) or min(load, key=lambda k: after(candidate, k))
        load[kind] += _slowness(problem, candidate, kind)
        free[kind] -= candidate.min_devices
        kinds[candidate.number] = kind
    return kinds


def _slowness(problem: AllocationProblem, candidate: Candidate, kind: str) -> float:
    """How many times longer it takes there than on the type that suits it best."""
    best = max(candidate.rates_on(k)[0] for k in problem.num_by_kind)
    return best / candidate.rates_on(kind)[0]


# -- several types at once ------------------------------------------------------------------------


def _mixtures(problem: AllocationProblem) -> Choice:
    """Trials that are on several types, or need them: as they are, or with as few as they can."""
    free = dict(problem.num_by_kind)
    for share in pinned_choice(problem).values():
        for kind, m in share.items():
            free[kind] -= m
    choice: Choice = {}
    largest = max(problem.num_by_kind.values())
    candidates = [c for c in problem.by_number.values() if c.spans_types]
    for c in sorted(candidates, key=lambda c: problem.kept_width(c) is None):
        share = share_of(problem, c.devices)
        if c.number in problem.pinned:
            if len(share) > 1:
                choice[c.number] = share
            continue
        stays = len(share) > 1 and problem.kept_width(c) is not None
        if not stays and c.min_devices <= largest:
            continue
        if not stays or any(free[kind] < m for kind, m in share.items()):
            share = _spread(free, problem.types_of(c.number, SEVERAL), c.min_devices)
        for kind, m in share.items():
            free[kind] -= m
        choice[c.number] = share
    return {number: share for number, share in choice.items() if share}


def _spread(free: Mapping[str, int], kinds: Iterable[str], m: int) -> dict[str, int]:
    """So many devices, of the first types first; none if there are not as many."""
    share: dict[str, int] = {}
    for kind in kinds:
        if taken := min(free[kind], m - sum(share.values())):
            share[kind] = taken
    return share if sum(share.values()) == m else {}


def _plan_of(problem: AllocationProblem, choice: Choice, name: str) -> Plan:
    pinned = pinned_choice(problem)
    placed = place_changes(problem, choice | pinned)
    settled, groups = groups_of(problem, choice)
    only = replace(settled, candidates=tuple(c for c in settled.candidates if c.number in choice))
    return assemble(only, groups, placement=placed, allocator=name, status="heuristic")


def _without(problem: AllocationProblem, flotillas: Iterable[Flotilla]) -> AllocationProblem:
    """The problem without these trials and their devices; the others are on one type at most."""
    assignments = {a.number: a for f in flotillas for a in f.assignments}
    gone = {device for a in assignments.values() for device in a.devices}
    left = (c for c in problem.candidates if c.number not in assignments)
    return replace(
        problem,
        candidates=tuple(_on_one_type(problem, c) for c in left),
        nodes=tuple(tuple(d for d in node if d not in gone) for node in problem.nodes),
    )


def _on_one_type(problem: AllocationProblem, candidate: Candidate) -> Candidate:
    """As it is if it leaves its mixture: with those of its devices that most are like."""
    if problem.kind_now(candidate) != SEVERAL:
        return candidate
    usable = [d for d in candidate.devices if problem.kind_of([d])]
    kind, _ = Counter(problem.kind_of([d]) for d in usable).most_common(1)[0]
    return replace(
        candidate,
        devices=tuple(d for d in usable if problem.kind_of([d]) == kind),
        rates=candidate.rates_on(kind),
        movable=True,
    )


# -- parts ----------------------------------------------------------------------------------------


def _part(problem: AllocationProblem, kind: str, numbers: Iterable[int]) -> AllocationProblem:
    """These trials on the devices of that type, with its share of the trials to come."""
    there = zip(problem.kinds, problem.nodes, strict=True)
    share = problem.num_by_kind[kind] / max(problem.num_devices, 1)
    return replace(
        problem,
        candidates=tuple(problem.by_number[t].as_on(kind) for t in sorted(numbers)),
        nodes=tuple(node for k, node in there if k == kind),
        kinds=(),
        num_to_come=math.ceil(problem.num_to_come * share),
    )


def _merged(name: str, plans: Mapping[str, Plan]) -> Plan:
    statuses = {plan.status for plan in plans.values()}
    return Plan(
        flotillas=(),
        allocator=name,
        reason="; ".join(f"{kind}: {plan.reason}" for kind, plan in plans.items())
        or "no trials, no devices",
        status="trivial" if statuses == {"trivial"} else "heuristic",
    )


def _served(problem: AllocationProblem, flotillas: Sequence[Flotilla]) -> list[Flotilla]:
    """Those that the preprocessors can serve beside who can't move, the first ones first."""
    limit = stream_limit(problem)
    staying = {f: _only(f, problem.pinned) for f in flotillas}
    drawn = sum(f.stream_rate for f in staying.values())
    served = []
    for flotilla in flotillas:
        more = drawn + flotilla.stream_rate - staying[flotilla].stream_rate
        if affordable(more, limit):
            served.append(flotilla)
            drawn = more
        elif staying[flotilla].assignments:
            served.append(staying[flotilla])
    return served


def _only(flotilla: Flotilla, numbers: Container[int]) -> Flotilla:
    return Flotilla(assignments=tuple(a for a in flotilla.assignments if a.number in numbers))


CAUTIOUS = ByKind(inner=GreedyAllocator(keep_flying=True))
"""The fallback of every policy."""
