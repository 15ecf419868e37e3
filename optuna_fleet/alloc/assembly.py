"""From widths to a plan: what every allocator does once it knows how many devices a trial gets."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence

from optuna_fleet.alloc.placement import place
from optuna_fleet.alloc.problem import AllocationProblem, Assignment, Candidate, Flotilla, Plan
from optuna_fleet.alloc.streams import (
    Grouping,
    Widths,
    affordable,
    group_widths,
    serves,
    stream_limit,
)

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
        fits = candidate.min_devices <= m <= candidate.widest
        if fits and is_served({**kept, number: m}):
            kept[number] = m
            taken.update(candidate.devices)
    return kept


def fill_idle(problem: AllocationProblem, widths: Mapping[int, int]) -> Widths:
    """Gives devices left over to waiting trials: no device idles while a trial could use it.

    The longest waiting start first, each on as few devices as it can. Devices still left go to
    trials that don't fly yet, slowest first, while that raises their rate and needs no further
    flotilla. No trial gets less than in ``widths``, and none that flies now is rescaled. Whatever
    the preprocessors could not serve is left alone.
    """
    filled = dict(widths)
    by_number = problem.by_number
    is_served = serves(problem)
    free = problem.num_devices - sum(filled.values())
    waiting = [c for c in problem.candidates if c.number not in filled]
    for c in sorted(waiting, key=lambda c: (-c.waited_rounds, c.number)):
        if c.min_devices <= free and is_served({**filled, c.number: c.min_devices}):
            filled[c.number] = c.min_devices
            free -= c.min_devices
    most = len(group_widths(problem, filled))
    starting = {t: m for t, m in filled.items() if not by_number[t].devices}

    def is_admissible(changed: Widths) -> bool:
        wider = {**filled, **changed}
        return len(group_widths(problem, wider)) <= most and is_served(wider)

    return filled | grow(by_number, starting, free, is_admissible)


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
    devices = _place(problem, widths) if placement is None else placement
    flotillas = tuple(
        Flotilla(
            assignments=tuple(
                Assignment(number=t, devices=devices[t], rate=by_number[t].rate(m))
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


def _place(problem: AllocationProblem, widths: Widths) -> dict[int, tuple[int, ...]]:
    """Devices of each trial; those that must stay do so even if others claim their devices."""
    by_number = problem.by_number
    pinned = {t: by_number[t].devices for t in problem.pinned}
    taken = {device for devices in pinned.values() for device in devices}
    nodes = [[device for device in node if device not in taken] for node in problem.nodes]
    current = {t: c.devices for t, c in by_number.items() if c.devices}
    return place({t: m for t, m in widths.items() if t not in pinned}, nodes, current) | pinned


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
