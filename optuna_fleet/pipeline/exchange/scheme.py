"""Which node preprocesses a chunk, and from whom the others get it. Pure.

A chunk ranks the nodes. Every node fetches from one that ranks before it, or makes the chunk if
none of these can be reached; so nodes never wait for each other in a circle, whatever they
believe about who is up. The node that ranks first is the chunk's *owner*.

| scheme | owner | the others get it from |
|---|---|---|
| self | every node itself | nobody |
| all-shared | chunk mod n | the owner |
| single-broadcast | chunk mod p | the p preprocessor nodes from the owner; the last of these, the
leader, hands on to the n - p others, which form a binary tree below it |
| multi-broadcast | chunk mod p | a binary tree of all nodes below the owner |

Trees are of pulls: an inner node gets the chunk for itself and hands it on while it has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

Scheme = Literal["self", "all-shared", "single-broadcast", "multi-broadcast"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A scheme with its sizes; ``num_preprocessor_nodes`` (the first so many) is for broadcasts.

    Attributes:
        version: 0 until measurements have decided, then 1.
    """

    scheme: Scheme
    num_nodes: int
    num_preprocessor_nodes: int
    version: int = 0

    def __str__(self) -> str:
        if self.scheme in ("self", "all-shared"):
            return self.scheme
        return f"{self.scheme} from {self.num_preprocessor_nodes} of {self.num_nodes} nodes"


def makers(plan: Plan) -> int:
    """Returns how many nodes share the preprocessing of an epoch."""
    sharing = {"self": 1, "all-shared": plan.num_nodes}
    return sharing.get(plan.scheme, plan.num_preprocessor_nodes)


def source(plan: Plan, node: int, chunk: int, up: Collection[int]) -> int | None:
    """Returns the node to fetch the chunk from, or None: preprocess it here.

    Args:
        plan: The plan.
        node: Who wants it.
        chunk: Its number in the epoch.
        up: Nodes that can be asked.
    """
    return next((other for other in sources(plan, node, chunk) if other in up), None)


def sources(plan: Plan, node: int, chunk: int) -> tuple[int, ...]:
    """Returns all nodes that may be asked for a chunk, best first.

    First those on the way to the owner; then, for the case of their loss, whoever else ranks
    before this node, so that all agree on who stands in for a lost owner.
    """
    if plan.scheme == "self":
        return ()
    ranking = _ranking(plan, chunk)
    way = _way_to_owner(plan, node, ranking)
    before = ranking[: ranking.index(node)]
    return (*way, *(other for other in before if other not in way))


def traffic(plan: Plan) -> dict[tuple[int, int], float]:
    """Returns the part of all chunks that travels over each link (from, to) while all are up."""
    p, n = makers(plan), plan.num_nodes
    period = p * max(1, n - p)
    counts: Counter[tuple[int, int]] = Counter()
    for chunk in range(period):
        for node in range(n):
            if asked := sources(plan, node, chunk):
                counts[asked[0], node] += 1
    return {link: count / period for link, count in counts.items()}


def _ranking(plan: Plan, chunk: int) -> list[int]:
    """The owner, the other preprocessor nodes, then all others."""
    p = makers(plan)
    first = [(chunk + k) % p for k in range(p)]
    others = list(range(p, plan.num_nodes))
    if others and plan.scheme == "multi-broadcast":
        turn = chunk // p % len(others)  # each is an inner node of the tree in its turn
        others = others[turn:] + others[:turn]
    return first + others


def _way_to_owner(plan: Plan, node: int, ranking: list[int]) -> list[int]:
    owner, p = ranking[0], plan.num_preprocessor_nodes
    if node == owner:
        return []
    match plan.scheme:
        case "multi-broadcast":
            return _ancestors(ranking, node)
        case "single-broadcast" if node >= p:
            leader = p - 1
            way = _ancestors([leader, *ranking[p:]], node)
            return way if leader == owner else [*way, owner]
        case _:
            return [owner]


def _ancestors(tree: list[int], node: int) -> list[int]:
    """The nodes above ``node`` in the binary tree that is stored breadth first, nearest first."""
    place = tree.index(node)
    above = []
    while place:
        place = (place - 1) // 2
        above.append(tree[place])
    return above
