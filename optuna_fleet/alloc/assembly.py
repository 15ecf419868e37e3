"""From widths to a plan: what every allocator does once it knows how many devices a trial gets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from optuna_fleet.alloc.model import Decision
from optuna_fleet.alloc.placement import place_choice
from optuna_fleet.alloc.problem import AllocationProblem, Assignment, Candidate, Flotilla, Plan
from optuna_fleet.alloc.shares import Choice, Placement, groups_of
from optuna_fleet.alloc.streams import (
    Grouping,
    Widths,
    affordable,
    group_widths,
    serves,
    stream_limit,
)

Place = Callable[[AllocationProblem, Choice], Placement]
"""Chooses the devices of a choice."""

_NAMED_WAITERS = 3


def staying(problem: AllocationProblem, *, grouping: Grouping = group_widths) -> Widths:
    """Widths of all trials that can fly on where they are, whether they have to or not.

    Those that have to come first; the others follow in the order of their numbers, unless they
    claim a device already claimed, or the preprocessors could not serve them as well.
    """
    kept = dict(problem.pinned)
    by_number = problem.by_number
    taken = {device for number in kept for device in by_number[number].devices}
    is_served = serves(problem, grouping=grouping)
    for number, candidate in by_number.items():
        m = problem.kept_width(candidate)
        if m is None or number in kept or taken & set(candidate.devices):
            continue
        if is_served({**kept, number: m}):
            kept[number] = m
            taken.update(candidate.devices)
    return kept


def plan_of(
    problem: AllocationProblem, decision: Decision, place: Place, *, allocator: str
) -> Plan:
    """The plan of what the model has decided."""
    settled, groups = groups_of(problem, decision.choice)
    plan = assemble(
        settled,
        groups,
        placement=place(problem, decision.choice),
        allocator=allocator,
        status=decision.status,
        gap=decision.gap,
    )
    return replace(plan, solver=decision.solver)


def assemble(
    problem: AllocationProblem,
    groups: Iterable[Mapping[int, int]],
    *,
    allocator: str,
    status: str,
    gap: float | None = None,
    placement: Mapping[int, tuple[int, ...]] | None = None,
) -> Plan:
    """Places the trials, unless `placement` has their devices, and says why."""
    groups = [dict(sorted(group.items())) for group in groups]
    by_number = problem.by_number
    widths = {number: m for group in groups for number, m in group.items()}
    if placement is None:
        placement = place_choice(problem, on_one_type(problem, widths))
    flotillas = tuple(
        Flotilla(
            assignments=tuple(
                Assignment(number=t, devices=placement[t], rate=by_number[t].rate(m))
                for t, m in group.items()
            )
        )
        for group in groups
    )
    return Plan(
        flotillas=flotillas,
        allocator=allocator,
        reason=_reason(problem, flotillas),
        status=status,
        gap=gap,
    )


def on_one_type(problem: AllocationProblem, widths: Mapping[int, int]) -> Choice:
    """These widths, where all devices are of one type."""
    kind = next(iter(problem.num_by_kind), "")
    return {number: {kind: m} for number, m in widths.items()}


def _reason(problem: AllocationProblem, flotillas: Sequence[Flotilla]) -> str:
    flying = {a.number for f in flotillas for a in f.assignments}
    used = sum(f.num_devices for f in flotillas)
    total = problem.num_devices
    waiting = [c for t, c in problem.by_number.items() if t not in flying]
    text = f"{len(flying)} of {len(problem.candidates)} trials on {used} of {total} devices"
    if len(flotillas) > 1:
        text += f" in {len(flotillas)} flotillas"
    if flotillas:
        text += f" at {' and '.join(map(_rate_range, flotillas))} samples/s"
    drawn = sum(f.stream_rate for f in flotillas)
    capacity = problem.preprocess_samples_per_s
    if capacity is not None and not affordable(drawn, capacity):
        text += f", slowed by preprocessors that give {capacity:.4g}"
    named = [f"trial {c.number} waits: {_why_waiting(problem, c, used, drawn)}" for c in waiting]
    if len(named) > _NAMED_WAITERS:
        named[_NAMED_WAITERS:] = [f"{len(named) - _NAMED_WAITERS} more wait"]
    return "; ".join([text, *named])


def _rate_range(flotilla: Flotilla) -> str:
    low, high = flotilla.reference_rate, flotilla.stream_rate
    return f"{low:.4g}..{high:.4g}" if high > low else f"{low:.4g}"


def _why_waiting(problem: AllocationProblem, candidate: Candidate, used: int, drawn: float) -> str:
    total = problem.num_devices
    if candidate.min_devices > total:
        return f"it needs {candidate.min_devices} devices, there are {total}"
    if used == total:
        return "the others make more of the devices"
    if candidate.min_devices > total - used:
        return f"it needs {candidate.min_devices} devices, {total - used} are left"
    if not affordable(drawn + candidate.rate(candidate.min_devices), stream_limit(problem)):
        return "the preprocessors can't serve it as well"
    return "the flotilla does not take it"
