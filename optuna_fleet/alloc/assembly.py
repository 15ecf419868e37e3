"""From widths to a plan: what every allocator does once it knows how many devices a trial gets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from optuna_fleet.alloc.placement import place
from optuna_fleet.alloc.problem import AllocationProblem, Assignment, Candidate, Flotilla, Plan

Widths = dict[int, int]
"""Trial number -> devices it gets."""

_NAMED_WAITERS = 3


def group_by_rate(rates: Mapping[int, float], rate_spread: float) -> list[list[int]]:
    """The fewest flotillas in which no trial is faster than ``rate_spread`` times the slowest.

    Args:
        rates: Trial number -> samples/s.
        rate_spread: Fastest over slowest rate within one flotilla, at most.

    Returns:
        Trial numbers of each flotilla, slowest flotilla and slowest trial first.
    """
    groups: list[list[int]] = []
    for number in sorted(rates, key=lambda t: (rates[t], t)):
        if groups and rates[number] <= rates[groups[-1][0]] * rate_spread:
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups


def group_widths(problem: AllocationProblem, widths: Mapping[int, int]) -> list[Widths]:
    """The fewest flotillas these widths need, slowest first; see :func:`group_by_rate`."""
    by_number = problem.by_number
    rates = {t: by_number[t].rate(m) for t, m in widths.items()}
    return [{t: widths[t] for t in g} for g in group_by_rate(rates, problem.rate_spread)]


def fill_idle(problem: AllocationProblem, widths: Mapping[int, int]) -> Widths:
    """Gives devices left over to waiting trials: no device idles while a trial could use it.

    The longest waiting start first, each on as few devices as it can. Devices still left go to
    trials that don't fly yet, slowest first, while that raises their rate and needs no further
    flotilla. No trial gets less than in ``widths``, and none that flies now is rescaled.
    """
    filled = dict(widths)
    by_number = problem.by_number
    free = problem.num_devices - sum(filled.values())
    waiting = [c for c in problem.candidates if c.number not in filled]
    for candidate in sorted(waiting, key=lambda c: (-c.waited_rounds, c.number)):
        if candidate.min_devices <= free:
            filled[candidate.number] = candidate.min_devices
            free -= candidate.min_devices
    most = len(group_widths(problem, filled))
    starting = {t: m for t, m in filled.items() if not by_number[t].devices}

    def admissible(changed: Widths) -> bool:
        return len(group_widths(problem, {**filled, **changed})) <= most

    return filled | grow(by_number, starting, free, admissible)


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
    wider = (w for w in candidate.useful_widths(m + free) if w > m)
    return next((w for w in wider if candidate.rate(w) > candidate.rate(m)), None)


def assemble(
    problem: AllocationProblem,
    groups: Iterable[Mapping[int, int]],
    *,
    allocator: str,
    status: str,
    gap: float | None = None,
    solve_time_s: float = 0.0,
) -> Plan:
    """Places the trials and says why.

    Args:
        problem: The problem the widths belong to.
        groups: Trial number -> devices it gets, one mapping per flotilla.
        allocator: Name of the allocator.
        status: See :class:`Plan`.
        gap: See :class:`Plan`.
        solve_time_s: See :class:`Plan`.
    """
    groups = [dict(sorted(group.items())) for group in groups]
    by_number = problem.by_number
    widths = {number: m for group in groups for number, m in group.items()}
    current = {c.number: c.devices for c in problem.candidates if c.devices}
    devices = place(widths, problem.nodes, current)
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
        solve_time_s=solve_time_s,
    )


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
    named = [f"trial {c.number} waits: {_why_waiting(c, total, used)}" for c in waiting]
    if len(named) > _NAMED_WAITERS:
        named[_NAMED_WAITERS:] = [f"{len(named) - _NAMED_WAITERS} more wait"]
    return "; ".join([text, *named])


def _rate_range(flotilla: Flotilla) -> str:
    low, high = flotilla.reference_rate, max(a.rate for a in flotilla.assignments)
    return f"{low:.4g}..{high:.4g}" if high > low else f"{low:.4g}"


def _why_waiting(candidate: Candidate, total: int, used: int) -> str:
    if candidate.min_devices > total:
        return f"it needs {candidate.min_devices} devices, there are {total}"
    if used == total:
        return "the others make more of the devices"
    return f"it needs {candidate.min_devices} devices, {total - used} are left"
