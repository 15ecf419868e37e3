"""Small changes to what flies: whom to give devices now, and which to give up.

Placing everything anew would move trials that only grow or shrink. Here each trial keeps what it
has as far as its width allows, gives up the devices that joined last (young ones are taken back
soonest: idle spells are short or long, ``docs/allocation.md``), and grows where it already is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from optuna_fleet.alloc.problem import AllocationProblem, Candidate
from optuna_fleet.alloc.streams import Widths, serves

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
    priority, flying ones grow and after them waiting ones start, as far as devices are free. What
    the preprocessors could not serve gets less, or nothing. If that leaves nobody, the slowest
    trial flies: see :func:`optuna_fleet.alloc.streams.stream_limit`.

    Returns:
        Trial number -> devices it gets now.
    """
    widths = dict(problem.pinned)
    is_served = serves(problem)
    movable = [problem.by_number[number] for number in wishes.widths if number not in widths]

    def served_width(candidate: Candidate, m: int) -> int:
        if is_served({**widths, candidate.number: m}):
            return m
        narrower = candidate.useful_widths(m - 1)[::-1]
        return next((w for w in narrower if is_served({**widths, candidate.number: w})), 0)

    for candidate in movable:
        kept = min(wishes.widths[candidate.number], _width_now(problem, candidate))
        if kept and (m := served_width(candidate, kept)):
            widths[candidate.number] = m
    free = problem.num_devices - sum(widths.values())
    for candidate in sorted(movable, key=lambda c: c.number not in widths):
        now, m = widths.get(candidate.number, 0), wishes.widths[candidate.number]
        if m > now + free:
            m = max(candidate.useful_widths(now + free), default=0)
        if m > now and (m := served_width(candidate, m)) > now and wishes.pays(candidate, now, m):
            widths[candidate.number] = m
            free -= m - now
    return widths or _slowest(problem)


def _width_now(problem: AllocationProblem, candidate: Candidate) -> int:
    """Devices it could go on with: after a loss, what is left may be too few."""
    now = problem.kept_width(candidate) or 0
    return now if now >= candidate.min_devices else 0


def _slowest(problem: AllocationProblem) -> Widths:
    fitting = [c for c in problem.by_number.values() if c.min_devices <= problem.num_devices]
    slowest = min(fitting, key=lambda c: c.rate(c.min_devices), default=None)
    return {slowest.number: slowest.min_devices} if slowest else {}


def place_changes(problem: AllocationProblem, widths: Mapping[int, int]) -> Placement:
    """Chooses devices so that as little as possible changes; see the module.

    Returns:
        Trial number -> device indices: kept ones as they were, changed ones ascending.
    """
    by_number = problem.by_number
    usable = set(problem.devices)
    placed: Placement = {}
    for number in sorted(widths, key=lambda t: t not in problem.pinned):
        own = [d for d in by_number[number].devices if d in usable]
        m = widths[number]
        placed[number] = tuple(own if len(own) <= m else _eldest(problem, own, m))
        usable.difference_update(placed[number])
    free = _Free(problem, placed)
    # The largest first: they are the hardest to keep together.
    for number in sorted(widths, key=lambda t: (len(placed[t]) - widths[t], t)):
        if missing := widths[number] - len(placed[number]):
            grown = free.take(missing, near=placed[number])
            placed[number] = tuple(sorted((*placed[number], *grown)))
    return placed


def _eldest(problem: AllocationProblem, devices: Iterable[int], m: int) -> list[int]:
    age_order = sorted(devices, key=lambda d: (problem.joined.get(d, -1), d))
    return sorted(age_order[:m])


class _Free:
    """Devices that nobody has, by node in ascending order."""

    def __init__(self, problem: AllocationProblem, placed: Placement) -> None:
        taken = {device for devices in placed.values() for device in devices}
        self._node_of = problem.node_of
        self._devices: dict[int, list[int]] = {}
        for device in problem.devices:
            if device not in taken:
                self._devices.setdefault(self._node_of[device], []).append(device)
        self._most = max(map(len, self._devices.values()), default=0)

    def take(self, m: int, near: Iterable[int]) -> list[int]:
        """Takes `m` devices: from the nodes of those near, then from as few others as possible."""
        own = {self._node_of[device] for device in near}
        taken: list[int] = []
        while len(taken) < m:
            missing = m - len(taken)
            node = self._fitting(sorted(own & self._devices.keys()), missing)
            devices = self._devices[node]
            taken += devices[:missing]
            self._devices[node] = devices[missing:]
            if not self._devices[node]:
                del self._devices[node]
        return taken

    def _fitting(self, near: Sequence[int], m: int) -> int:
        """The first node that holds `m`, else the first: neighbours tend to leave together."""
        nodes = near or self._devices
        if m <= self._most:  # else there is no need to look, and there may be thousands
            holding = (n for n in nodes if len(self._devices[n]) >= m)
            return next(holding, next(iter(nodes)))
        return next(iter(nodes))
