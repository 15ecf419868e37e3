"""Trials on devices of several types at once: who gets such a mixture, and which devices.

The same allocator is asked as if all devices were of one type. Of its plan a trial that spans
types keeps its devices if it needs more than there are of any one type, is to have more, or is on
them already. All others are planned for type by type, on what that leaves.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import replace

from optuna_fleet.alloc.assembly import assemble
from optuna_fleet.alloc.problem import SEVERAL, AllocationProblem, Allocator, Candidate, Plan
from optuna_fleet.alloc.streams import affordable, demand, group_widths, stream_limit


def plan_mixtures(problem: AllocationProblem, inner: Allocator, *, cautious: bool) -> Plan | None:
    """Plans for the trials that get devices of several types.

    Args:
        problem: All of it, with several device types.
        inner: Decides, as if there were one.
        cautious: None that flies gets a mixture, unless it is on it already.

    Returns:
        Their plan, with why those wait that need a mixture; None if there are none of either.

    Raises:
        AllocationFailed: The allocator has no answer.
    """
    if not any(c.spans_types for c in problem.candidates):
        return None
    plan = inner.allocate(_as_one_type(problem))
    given = {
        number: a.devices
        for number, a in plan.assignments.items()
        if _is_mixture(problem, problem.by_number[number], a.devices, cautious=cautious)
    }
    if not _are_served(problem, given):
        given = {number: devices for number, devices in given.items() if number in problem.pinned}
    waiting = {c.number for c in problem.candidates if _needs_mixture(problem, c)} - given.keys()
    if not given and not waiting:
        return None
    others = (a.devices for a in plan.assignments.values() if a.number not in given)
    mixed = _without_devices(_only(problem, given.keys() | waiting), others)
    return assemble(
        mixed,
        group_widths(mixed, {number: len(devices) for number, devices in given.items()}),
        allocator=inner.name,
        status=plan.status,
        placement=given,
    )


def without(problem: AllocationProblem, plan: Plan | None) -> AllocationProblem:
    """The problem without these trials and their devices; the others are on one type at most."""
    assignments = plan.assignments if plan else {}
    left = tuple(
        _on_one_type(problem, c)
        for c in problem.candidates
        if c.number not in assignments and not _needs_mixture(problem, c)
    )
    taken = (a.devices for a in assignments.values())
    return _without_devices(replace(problem, candidates=left), taken)


def _needs_mixture(problem: AllocationProblem, candidate: Candidate) -> bool:
    """Whether it must be on devices of several types, and is to be placed."""
    is_large = candidate.min_devices > max(problem.num_by_kind.values())
    return is_large and candidate.spans_types and candidate.number not in problem.pinned


def _without_devices(
    problem: AllocationProblem, taken: Iterable[tuple[int, ...]]
) -> AllocationProblem:
    gone = {device for devices in taken for device in devices}
    nodes = (tuple(d for d in node if d not in gone) for node in problem.nodes)
    return replace(problem, nodes=tuple(nodes))


def _as_one_type(problem: AllocationProblem) -> AllocationProblem:
    """As if all devices were of one type, for those whom that can serve; fast ones come first."""
    most = max(problem.num_by_kind.values())
    candidates = []
    for candidate in problem.candidates:
        one = replace(candidate, rates_by_kind={})
        if candidate.spans_types:
            one = replace(one, rates=_best_rates(problem, candidate))
        elif candidate.number not in problem.pinned:
            if candidate.min_devices > most:
                continue
            one = replace(one, max_devices=min(candidate.widest, most))
        candidates.append(one)
    speeds = {
        kind: sum(c.rates_on(kind)[0] for c in problem.candidates if c.spans_types)
        for kind in problem.num_by_kind
    }
    nodes = sorted(
        zip(problem.kinds, problem.nodes, strict=True), key=lambda node: -speeds[node[0]]
    )
    one_type = tuple(node for _, node in nodes)
    return replace(problem, candidates=tuple(candidates), nodes=one_type, kinds=())


def _best_rates(problem: AllocationProblem, candidate: Candidate) -> tuple[float, ...]:
    """On the type that suits it best, as far as there are as many devices, or on a mixture."""
    kinds = problem.num_by_kind.items()
    return tuple(
        max([rate, *(candidate.rates_on(kind)[m - 1] for kind, n in kinds if n >= m)])
        for m, rate in enumerate(candidate.rates_on(SEVERAL), 1)
    )


def _is_mixture(
    problem: AllocationProblem, candidate: Candidate, devices: tuple[int, ...], *, cautious: bool
) -> bool:
    if not candidate.spans_types or problem.kind_of(devices) != SEVERAL:
        return False
    if set(devices) == set(candidate.devices):
        return True
    if cautious and (problem.kept_width(candidate) or 0) >= candidate.min_devices:
        return False
    return len(devices) > max(problem.num_by_kind.values())


def _are_served(problem: AllocationProblem, given: Mapping[int, tuple[int, ...]]) -> bool:
    """Whether the preprocessors can serve them beside the others that can't move."""
    limit = stream_limit(problem)
    if math.isinf(limit) or not given:
        return True
    mixed = _only(problem, given.keys())
    widths = {number: len(devices) for number, devices in given.items()}
    drawn = demand(mixed, group_widths(mixed, widths))
    others = (t for t in problem.pinned if t not in given)
    drawn += sum(problem.by_number[t].rate(problem.pinned[t]) for t in others)
    return affordable(drawn, limit)


def _only(problem: AllocationProblem, numbers: Set[int]) -> AllocationProblem:
    """These trials, with their rates on several types."""
    mixed = tuple(c.as_on(SEVERAL) for c in problem.candidates if c.number in numbers)
    return replace(problem, candidates=mixed, kinds=())


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
