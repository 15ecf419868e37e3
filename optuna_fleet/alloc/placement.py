"""Which devices: as few changes, and as few nodes per trial, as can be (FLEET, Eq. 4).

Each trial keeps what it has as far as its share allows, gives up the devices that joined last
(young ones are taken back soonest: idle spells are short or long, ``docs/allocation.md``), and
grows where it already is. What is missing is found as in FLEET's Algorithm 3: the widest trials
first, each on the node that fits tightest, else on as few nodes as can be. Nodes may be uneven and
partly taken.
"""

from __future__ import annotations

from collections.abc import Sequence

from optuna_fleet.alloc.draft import Choice, Share
from optuna_fleet.alloc.problem import AllocationProblem

Placement = dict[int, tuple[int, ...]]
"""Trial number -> devices."""


def place(problem: AllocationProblem, choice: Choice) -> Placement:
    """Chooses the devices of a choice.

    Returns:
        Trial number -> device indices: kept ones as they were, changed ones ascending.
    """
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
