"""Which devices: few nodes per trial, small trials together (FLEET, Eq. 4 and Algorithm 3).

FLEET places onto equal, empty nodes in the order of device numbers. Here nodes may be uneven and
partly taken, so "the next devices" becomes "the node that fits tightest", and both are tried.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from optuna_fleet.alloc.problem import AllocationProblem
from optuna_fleet.alloc.shares import Placement, Share

MAX_ORDERS = 1024
"""Orders of the last trials that are tried at most (FLEET, appendix A)."""

_MAX_STEPS = 8_000  # trials placed in one search; keeps hundreds of trials within a second
_FEW = 4  # so few trials are searched to the end, for the sake of what decides between equals

_Nodes = list[list[int]]
_Fit = Callable[[list[int], int], list[int]]


def fleet_score(assignments: Mapping[int, Sequence[int]], nodes: Sequence[Sequence[int]]) -> float:
    """Loss of FLEET's Eq. 4: the sum over trials of (nodes it uses) / (devices it has)."""
    node_of = {device: n for n, node in enumerate(nodes) for device in node}
    return sum(len({node_of[d] for d in a}) / len(a) for a in assignments.values() if a)


def place_choice(problem: AllocationProblem, choice: Mapping[int, Share]) -> Placement:
    """Places each type's devices by :func:`place`; who can't move stays, whoever claims it."""
    by_number = problem.by_number
    pinned = {t: by_number[t].devices for t in problem.pinned}
    taken = {device for devices in pinned.values() for device in devices}
    placed = dict(pinned)
    for kind in problem.num_by_kind:
        nodes = [
            [device for device in node if device not in taken]
            for n, node in enumerate(problem.nodes)
            if problem.kind_of_node(n) == kind
        ]
        there = {device for node in nodes for device in node}
        counts = {t: s[kind] for t, s in choice.items() if kind in s and t not in pinned}
        current = {t: tuple(d for d in by_number[t].devices if d in there) for t in counts}
        for number, devices in place(counts, nodes, current).items():
            placed[number] = (*placed.get(number, ()), *devices)
    return placed


def place(
    counts: Mapping[int, int],
    nodes: Sequence[Sequence[int]],
    current: Mapping[int, tuple[int, ...]],
) -> dict[int, tuple[int, ...]]:
    """Chooses devices for each trial.

    A trial that keeps its count keeps its devices if all of them are available. The others follow
    Algorithm 3: trials that fill whole nodes, pairs that fill them together, then a search over
    orders of the rest, at most ``MAX_ORDERS``, for the least Eq. 4; among equals the one that
    leaves fewer nodes partly used, then the one that moves trials off fewer of their devices.

    Args:
        counts: Trial number -> devices it gets, at least 1.
        nodes: Device indices that may be used, per node.
        current: Trial number -> devices it has now.

    Returns:
        Trial number -> device indices; kept ones as they were, new ones ascending.
    """
    assert sum(counts.values()) <= sum(map(len, nodes))
    placed = _keep(counts, nodes, current)
    free = _without(nodes, placed.values())
    rest = {t: counts[t] for t in sorted(counts, key=lambda t: (-counts[t], t)) if t not in placed}
    for phase in (_fill_whole_nodes, _fill_nodes_in_pairs):
        found = phase(rest, free, current)
        placed |= found
        free = _without(free, found.values())
        rest = {t: m for t, m in rest.items() if t not in found}
    return dict(sorted((placed | _search(rest, free, current)).items()))


def _keep(
    counts: Mapping[int, int],
    nodes: Sequence[Sequence[int]],
    current: Mapping[int, tuple[int, ...]],
) -> Placement:
    left = {device for node in nodes for device in node}
    kept: Placement = {}
    for number in sorted(counts):
        devices = current.get(number, ())
        if len(devices) == counts[number] and left.issuperset(devices):
            kept[number] = tuple(devices)
            left.difference_update(devices)
    return kept


def _without(nodes: Sequence[Sequence[int]], taken: Iterable[Sequence[int]]) -> _Nodes:
    gone = {device for devices in taken for device in devices}
    return [[device for device in node if device not in gone] for node in nodes]


def _fewest_nodes(m: int, free: Sequence[Sequence[int]]) -> int:
    sizes = itertools.accumulate(sorted(map(len, free), reverse=True))
    return next(n for n, covered in enumerate(sizes, 1) if covered >= m)


def _whole_nodes(m: int, free: _Nodes) -> list[int] | None:
    """Equally free nodes that ``m`` fills exactly; None if fewer nodes could hold it."""
    for size in sorted({len(node) for node in free if node}, reverse=True):
        alike = [n for n, node in enumerate(free) if len(node) == size]
        if m % size == 0 and m // size <= len(alike):
            return alike[: m // size] if m // size == _fewest_nodes(m, free) else None
    return None


def _fill_whole_nodes(
    rest: Mapping[int, int], free: _Nodes, current: Mapping[int, tuple[int, ...]]
) -> Placement:
    found: Placement = {}
    left, failed = free, set[int]()
    for number, m in rest.items():
        if m in failed:  # whether nodes are filled depends on how many are free there only
            continue
        own = set(current.get(number, ()))
        nodes = sorted(left, key=lambda node: -len(own.intersection(node)))
        if (whole := _whole_nodes(m, nodes)) is None:
            failed.add(m)
            continue
        found[number] = tuple(sorted(device for n in whole for device in nodes[n]))
        left, failed = _without(left, [found[number]]), set()
    return found


def _fill_nodes_in_pairs(
    rest: Mapping[int, int], free: _Nodes, current: Mapping[int, tuple[int, ...]]
) -> Placement:
    found: Placement = {}
    left, failed = free, set[tuple[int, int]]()
    for pair in itertools.combinations(rest.items(), 2):
        (one, m), (other, n) = pair
        if one in found or other in found or (m, n) in failed:  # as in `_fill_whole_nodes`
            continue
        filled = _filling_together(pair, left, current)
        if not filled:
            failed.add((m, n))
            continue
        found |= filled
        left, failed = _without(left, filled.values()), set()
    return found


def _filling_together(
    pair: Sequence[tuple[int, int]], left: _Nodes, current: Mapping[int, tuple[int, ...]]
) -> Placement:
    """The pair on nodes that it fills, each on as few of them as it can be; else nothing."""
    whole = _whole_nodes(sum(m for _, m in pair), left)
    if whole is None:
        return {}
    filled = _in_order(pair, [left[n] for n in whole], current, _next)
    is_close = all(_spans(filled[t], left) == _fewest_nodes(m, left) for t, m in pair)
    return filled if is_close else {}


def _search(
    rest: Mapping[int, int], free: _Nodes, current: Mapping[int, tuple[int, ...]]
) -> Placement:
    best: Placement = {}
    best_cost = (math.inf, 0, 0)
    least = sum(_fewest_nodes(m, free) / m for m in rest.values())
    for order, fit in itertools.product(_orders(list(rest.items())), (_tightest, _next)):
        trial = _in_order(order, free, current, fit)
        cost = _cost(trial, free, current)
        if cost < best_cost:
            best, best_cost = trial, cost
        if best_cost[0] <= least + 1e-9 and len(rest) > _FEW:
            break
    return best


def _orders(items: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """All orders if they are few; else the widest first and random ones.

    Lexicographic order would only permute the last few trials within the cap.
    """
    limit = min(MAX_ORDERS, max(8, _MAX_STEPS // max(1, len(items))))
    if len(items) < 8 and math.factorial(len(items)) <= limit:
        yield from map(list, itertools.permutations(items))
        return
    yield items
    shuffle = random.Random(0)
    for _ in range(limit - 1):
        yield shuffle.sample(items, len(items))


def _in_order(
    order: Sequence[tuple[int, int]],
    free: _Nodes,
    current: Mapping[int, tuple[int, ...]],
    fit: _Fit,
) -> Placement:
    left = [list(node) for node in free]
    owner = {device: t for t, devices in current.items() for device in devices}
    placed: Placement = {}
    for number, m in order:
        chosen: list[int] = []
        for n in fit([len(node) for node in left], m):
            wish, left[n] = left[n], []
            if (missing := m - len(chosen)) < len(wish):
                # Own ones first, other trials' last: a trial that only grows should not move.
                rank = {d: (owner.get(d) != number, d in owner) for d in wish}
                here, wish = wish, sorted(wish, key=rank.__getitem__)[:missing]
                left[n] = [d for d in here if d not in wish]
            chosen += wish
        placed[number] = tuple(sorted(chosen))
    return placed


def _tightest(sizes: list[int], m: int) -> list[int]:
    """Nodes to use for ``m`` devices: the largest while none holds the rest, then the tightest."""
    chosen: list[int] = []
    left = dict(enumerate(sizes))
    while m > 0:
        holding = [n for n in left if left[n] >= m]
        n = min(holding, key=left.__getitem__) if holding else max(left, key=left.__getitem__)
        chosen.append(n)
        m -= left.pop(n)
    return chosen


def _next(sizes: list[int], m: int) -> list[int]:
    """Nodes in the order of their devices (FLEET, Algorithm 4)."""
    covered = itertools.accumulate(sizes, initial=0)
    return [n for n, before in zip(range(len(sizes)), covered, strict=False) if before < m]


def _cost(
    placed: Placement, free: _Nodes, current: Mapping[int, tuple[int, ...]]
) -> tuple[float, int, int]:
    used = {d for devices in placed.values() for d in devices}
    partly = sum(0 < len(used & set(node)) < len(node) for node in free)
    stayed = sum(len(set(devices) & set(current.get(t, ()))) for t, devices in placed.items())
    return round(fleet_score(placed, free), 9), partly, -stayed


def _spans(devices: Sequence[int], nodes: _Nodes) -> int:
    return sum(bool(set(devices) & set(node)) for node in nodes)
