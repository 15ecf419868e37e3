"""Small changes to what flies: which devices trials get, and which they give up.

Placing everything anew would move trials that only grow or shrink. Here each trial keeps what it
has as far as its share allows, gives up the devices that joined last (young ones are taken back
soonest: idle spells are short or long, ``docs/allocation.md``), and grows where it already is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from optuna_fleet.alloc.problem import AllocationProblem
from optuna_fleet.alloc.shares import Placement, Share


def place_changes(problem: AllocationProblem, choice: Mapping[int, Share]) -> Placement:
    """Chooses devices so that as little as possible changes; see the module.

    Returns:
        Trial number -> device indices: kept ones as they were, changed ones ascending.
    """
    usable = set(problem.devices)
    placed: Placement = {}
    for number in sorted(choice, key=lambda t: t not in problem.pinned):
        own = [d for d in problem.by_number[number].devices if d in usable]
        placed[number] = tuple(_kept(problem, own, choice[number]))
        usable.difference_update(placed[number])
    free = _Free(problem, usable)
    missing = {t: sum(share.values()) - len(placed[t]) for t, share in choice.items()}
    # The largest first: they are the hardest to keep together.
    for number in sorted(choice, key=lambda t: (-missing[t], t)):
        if missing[number]:
            placed[number] = tuple(sorted(free.grown(placed[number], choice[number])))
    return placed


def _kept(problem: AllocationProblem, own: Sequence[int], share: Share) -> list[int]:
    """As many of its devices as it is to have of each type; the eldest, if not all."""
    kept: set[int] = set()
    for kind, m in share.items():
        there = [d for d in own if problem.kind_of([d]) == kind]
        kept.update(sorted(there, key=lambda d: (problem.joined.get(d, -1), d))[:m])
    return [d for d in own if d in kept]


class _Free:
    """Devices that nobody has, by node in ascending order."""

    def __init__(self, problem: AllocationProblem, devices: set[int]) -> None:
        self._problem = problem
        self._devices: dict[int, list[int]] = {}
        for device in problem.devices:
            if device in devices:
                self._devices.setdefault(problem.node_of[device], []).append(device)
        self._most = max(map(len, self._devices.values()), default=0)

    def grown(self, devices: Sequence[int], share: Share) -> list[int]:
        """These devices, and what is missing of each type."""
        grown = list(devices)
        for kind, m in share.items():
            have = sum(self._problem.kind_of([d]) == kind for d in devices)
            grown += self._take(kind, m - have, near=devices)
        return grown

    def _take(self, kind: str, m: int, near: Iterable[int]) -> list[int]:
        """Takes `m` devices: from the nodes of those near, then from as few others as possible."""
        own = {self._problem.node_of[device] for device in near}
        taken: list[int] = []
        while len(taken) < m:
            missing = m - len(taken)
            nodes = [n for n in self._devices if self._problem.kind_of_node(n) == kind]
            node = self._fitting(sorted(own.intersection(nodes)) or nodes, missing)
            devices = self._devices[node]
            taken += devices[:missing]
            self._devices[node] = devices[missing:]
            if not self._devices[node]:
                del self._devices[node]
        return taken

    def _fitting(self, nodes: Sequence[int], m: int) -> int:
        """The first node that holds `m`, else the first: neighbours tend to leave together."""
        if m <= self._most:  # else there is no need to look, and there may be thousands
            holding = (n for n in nodes if len(self._devices[n]) >= m)
            return next(holding, nodes[0])
        return nodes[0]
