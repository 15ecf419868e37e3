"""From devices to a plan: what every allocator does once it knows what each trial gets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from optuna_fleet.alloc.draft import Decision, rates_of
from optuna_fleet.alloc.placement import place
from optuna_fleet.alloc.problem import AllocationProblem, Assignment, Candidate, Flotilla, Plan
from optuna_fleet.alloc.streams import affordable, flotillas_of, stream_limit

_NAMED_WAITERS = 3


def plan_of(
    problem: AllocationProblem,
    made: Decision,
    *,
    allocator: str,
    groups: Iterable[Iterable[int]] | None = None,
) -> Plan:
    """The plan of what was decided: which devices, in which flotillas, and why.

    Args:
        problem: What was to be decided.
        made: Who gets what.
        allocator: Name of who decided.
        groups: Trials of each flotilla; the fewest flotillas if not given.
    """
    placed, rates = place(problem, made.choice), rates_of(problem, made.choice)
    flotillas = tuple(
        Flotilla(
            assignments=tuple(
                Assignment(number=t, devices=placed[t], rate=rates[t]) for t in sorted(group)
            )
        )
        for group in (flotillas_of(problem, rates) if groups is None else groups)
    )
    return Plan(
        flotillas=flotillas,
        allocator=allocator,
        reason=_reason(problem, flotillas),
        status=made.status,
        solver=made.solver,
        gap=made.gap,
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
