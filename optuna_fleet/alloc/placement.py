"""From what each trial gets to a plan: which devices, and why.

As few changes, and as few nodes per trial, as can be (FLEET, Eq. 4).

Each trial keeps what it has as far as its share allows, gives up the devices that joined last
(young ones are taken back soonest: idle spells are short or long, ``docs/allocation.md``), and
grows where it already is. What is missing is found as in FLEET's Algorithm 3: the widest trials
first, each on the node that fits tightest, else on as few nodes as can be. Nodes may be uneven and
partly taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from optuna_fleet.alloc.draft import Choice, Decision, Share, rates_of
from optuna_fleet.alloc.problem import AllocationProblem, Assignment, Candidate, Flotilla, Plan
from optuna_fleet.alloc.streams import affordable, flotillas_of, stream_limit

Placement = dict[int, tuple[int, ...]]
"""Trial number -> devices."""


def place(problem: AllocationProblem, choice: Choice) -> Placement:
    """Chooses the devices of a choice: kept ones stay as they were, changed ones ascend."""
    usable = set(problem.devices)
    placed: Placement = {}
    for number in sorted(choice, key=lambda t: (t not in problem.pinned, t)):
        own = [d for d in problem.by_number[number].devices if d in usable]
        placed[number] = tuple(_kept(problem, own, choice[number]))
        usable.difference_update(placed[number])
    free = [[d for d in node if d in usable] for node in problem.nodes]
    missing = {t: sum(share.values()) - len(placed[t]) for t, share in choice.items()}
    # The widest first: they are the hardest to keep together.
    for number in sorted(choice, key=lambda t: (-missing[t], t)):
        if missing[number]:
            more = _grown(problem, free, placed[number], choice[number])
            placed[number] = tuple(sorted((*placed[number], *more)))
    return placed


def _kept(problem: AllocationProblem, own: Sequence[int], share: Share) -> list[int]:
    """As many of its devices as it is to have of each type; the eldest, if not all."""
    kept: set[int] = set()
    for kind, m in share.items():
        there = [d for d in own if problem.kind_of([d]) == kind]
        kept.update(sorted(there, key=lambda d: (problem.joined.get(d, -1), d))[:m])
    return [d for d in own if d in kept]


def _grown(
    problem: AllocationProblem, free: list[list[int]], devices: Sequence[int], share: Share
) -> list[int]:
    """Takes what is missing of each type: from its own nodes, then from as few as possible."""
    own = {problem.node_of[device] for device in devices}
    taken: list[int] = []
    for kind, m in share.items():
        m -= sum(problem.kind_of([d]) == kind for d in devices)
        nodes = [n for n, left in enumerate(free) if left and problem.kind_of_node(n) == kind]
        for there in ([n for n in nodes if n in own], [n for n in nodes if n not in own]):
            largest_first = sorted(there, key=lambda n: -len(free[n]))
            while m and largest_first:
                n = largest_first.pop(0)
                if len(free[n]) >= m:  # then rather the one that fits tightest
                    fitting = [k for k in (n, *largest_first) if len(free[k]) >= m]
                    n = min(fitting, key=lambda k: (len(free[k]), k))
                taken += free[n][:m]
                m, free[n] = max(0, m - len(free[n])), free[n][m:]
    return taken


# -- the plan ---------------------------------------------------------------------------------

_NAMED_WAITERS = 3


def plan_of(
    problem: AllocationProblem,
    made: Decision,
    *,
    allocator: str,
    groups: Iterable[Iterable[int]] | None = None,
) -> Plan:
    """The plan of what was decided: which devices, in which flotillas, and why.

    Flotillas are the fewest there can be, unless the groups of trials are given.
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
