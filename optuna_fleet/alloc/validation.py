"""What every plan must keep to."""

from __future__ import annotations

import math
from collections.abc import Iterator

from optuna_fleet.alloc.problem import (
    SEVERAL,
    AllocationProblem,
    Assignment,
    Candidate,
    Flotilla,
    Plan,
    repeated,
)
from optuna_fleet.alloc.streams import affordable, stream_limit

_TOLERANCE = 1e-9


def validate(problem: AllocationProblem, plan: Plan) -> None:
    """Checks a plan against its problem.

    The streams may together exceed the preprocessors' capacity only as far as can't be avoided:
    see :func:`optuna_fleet.alloc.streams.stream_limit`; trials that can't move may fly in any
    grouping if nothing flies beside them.

    Raises:
        ValueError: Lists every rule the plan breaks: unknown or repeated trials, devices that
            can't be used or are used twice, widths out of bounds, unlike device types in one
            trial that can't span them, wrong rates, trials that can't move but would, a spread of
            rates too large, unlike phases in one flotilla, streams that exceed the preprocessors'
            capacity.
    """
    if broken := list(_breaches(problem, plan)):
        raise ValueError(f"The plan of {plan.allocator} can't be flown: {'; '.join(broken)}.")


def _breaches(problem: AllocationProblem, plan: Plan) -> Iterator[str]:
    everything = [a for f in plan.flotillas for a in f.assignments]
    used = [device for a in everything for device in a.devices]
    if twice := repeated(a.number for a in everything):
        yield f"trials {twice} are assigned more than once"
    if twice := repeated(used):
        yield f"devices {twice} are used more than once"
    if absent := sorted(set(used) - set(problem.devices)):
        yield f"devices {absent} are not available"
    by_number, pinned = problem.by_number, problem.pinned
    for a in everything:
        kinds = problem.kinds_of(a.devices)
        yield from _assignment_breaches(by_number.get(a.number), a, kinds, a.number in pinned)
    if stuck := sorted(pinned.keys() - {a.number for a in everything}):
        yield f"trials {stuck} can't leave their devices now, but would"
    for flotilla in plan.flotillas:
        yield from _flotilla_breaches(problem, flotilla)
    yield from _capacity_breaches(problem, plan)


def _assignment_breaches(
    candidate: Candidate | None, assignment: Assignment, kinds: list[str], is_pinned: bool
) -> Iterator[str]:
    m = len(assignment.devices)
    if candidate is None:
        yield f"trial {assignment.number} is no candidate"
    elif is_pinned and set(assignment.devices) != set(candidate.devices):
        yield f"trial {assignment.number} can't move now, but would"
    elif not (is_pinned or candidate.min_devices <= m <= candidate.widest):
        yield (
            f"trial {assignment.number} has {m} devices, not {candidate.min_devices}.."
            f"{candidate.widest}"
        )
    elif len(kinds) > 1 and not candidate.spans_types:
        yield f"trial {assignment.number} has devices of types {kinds}"
    else:
        rate = candidate.rates_on(SEVERAL if len(kinds) > 1 else "".join(kinds))[m - 1]
        if not math.isclose(assignment.rate, rate, rel_tol=_TOLERANCE):
            yield f"trial {assignment.number} has rate {assignment.rate}, not {rate}"


def _flotilla_breaches(problem: AllocationProblem, flotilla: Flotilla) -> Iterator[str]:
    rates = [a.rate for a in flotilla.assignments]
    if not rates:
        yield "a flotilla is empty"
    elif max(rates) > min(rates) * problem.rate_spread * (1 + _TOLERANCE):
        yield (
            f"rates {min(rates):g}..{max(rates):g} samples/s spread by more than "
            f"{problem.rate_spread:g}"
        )
    by_number = problem.by_number
    known = [by_number[a.number] for a in flotilla.assignments if a.number in by_number]
    phases = sorted({candidate.epochs_done for candidate in known})
    if problem.phases and len(phases) > 1:
        yield f"phases {phases} are in one flotilla"


def _capacity_breaches(problem: AllocationProblem, plan: Plan) -> Iterator[str]:
    drawn = sum(flotilla.stream_rate for flotilla in plan.flotillas)
    is_choice = bool(plan.assignments.keys() - problem.pinned.keys())
    if is_choice and not affordable(drawn, limit := stream_limit(problem)):
        yield f"streams of {drawn:g} samples/s exceed the {limit:g} that preprocessors give"
