"""Small changes to what flies: whom to give devices now, and which to give up.

Placing everything anew would move trials that only grow or shrink. Here each trial keeps what it
has as far as its width allows, gives up the devices that joined last (young ones are taken back
soonest: idle spells are short or long, ``docs/allocation.md``), and grows where it already is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from optuna_fleet.alloc.problem import AllocationProblem, Candidate
from optuna_fleet.alloc.streams import Widths

Placement = dict[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What all trials should have, were it possible at once.

    Attributes:
        widths: Trial number -> devices, in order of priority; a trial not in it is to wait.
        pays: Whether a trial should go from so many devices (0 if it waits) to so many more, if
            there are not enough for its wish.
    """

    widths: Mapping[int, int]
    pays: Callable[[Candidate, int, int], bool]


def realise(problem: AllocationProblem, wishes: Wishes) -> Widths:
    """What can be done now towards the wishes.

    Trials that can't move keep their width. Of the others those that shrink do; then, in order of
    priority, flying ones grow and after them waiting ones start, as far as devices are free.

    Returns:
        Trial number -> devices it gets now.
    """
    widths = dict(problem.pinned)
    by_number = problem.by_number
    growing: list[tuple[bool, Candidate]] = []
    for number in (*wishes.widths, *(t for t in by_number if t not in wishes.widths)):
        if number in problem.pinned:
            continue
        now, wish = problem.kept_width(by_number[number]) or 0, wishes.widths.get(number, 0)
        if wish > now:
            growing.append((now == 0, by_number[number]))
        if min(wish, now):
            widths[number] = min(wish, now)
    free = problem.num_devices - sum(widths.values())
    for _, candidate in sorted(growing, key=lambda item: item[0]):
        now, m = widths.get(candidate.number, 0), wishes.widths[candidate.number]
        if m > now + free:
            m = max(candidate.useful_widths(now + free), default=0)
        if m > now and wishes.pays(candidate, now, m):
            widths[candidate.number] = m
            free -= m - now
    return widths


def place_changes(problem: AllocationProblem, widths: Mapping[int, int]) -> Placement:
    """Chooses devices so that as little as possible changes; see the module.

    Returns:
        Trial number -> device indices: kept ones as they were, changed ones ascending.
    """
    by_number = problem.by_number
    usable = set(problem.devices)
    placed: Placement = {}
    for number, m in widths.items():
        own = [d for d in by_number[number].devices if d in usable]
        placed[number] = tuple(own if len(own) <= m else _eldest(problem, own, m))
    free = _free_by_node(problem, placed)
    node_of = {device: n for n, node in enumerate(problem.nodes) for device in node}
    # The largest first: they are the hardest to keep together.
    for number in sorted(widths, key=lambda t: (len(placed[t]) - widths[t], t)):
        missing = widths[number] - len(placed[number])
        if missing:
            own_nodes = {node_of[device] for device in placed[number]}
            grown = _take(free, own_nodes, missing)
            placed[number] = tuple(sorted((*placed[number], *grown)))
    return placed


def _eldest(problem: AllocationProblem, devices: Iterable[int], m: int) -> list[int]:
    age_order = sorted(devices, key=lambda d: (problem.joined.get(d, -1), d))
    return sorted(age_order[:m])


def _free_by_node(problem: AllocationProblem, placed: Placement) -> dict[int, list[int]]:
    taken = {device for devices in placed.values() for device in devices}
    free = {n: [d for d in node if d not in taken] for n, node in enumerate(problem.nodes)}
    return {n: devices for n, devices in free.items() if devices}


def _take(free: dict[int, list[int]], own_nodes: set[int], m: int) -> list[int]:
    """Takes `m` devices: from the trial's own nodes, then from as few others as possible."""
    taken: list[int] = []
    while len(taken) < m:
        missing = m - len(taken)
        near = [n for n in free if n in own_nodes]
        node = _fitting(free, near or list(free), missing)
        taken += free[node][:missing]
        free[node] = free[node][missing:]
        if not free[node]:
            del free[node]
    return taken


def _fitting(free: Mapping[int, list[int]], nodes: list[int], m: int) -> int:
    """The first node that holds `m`, else the first: neighbours tend to leave together."""
    return next((n for n in sorted(nodes) if len(free[n]) >= m), min(nodes))
