"""Which devices become which virtual worker: the policies of HetPipe's section 8.1."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from optuna_fleet.arguments import check_number
from optuna_fleet.virtual_workers.partition import StageDevice

Workers = tuple[tuple[StageDevice, ...], ...]
"""Devices of each virtual worker."""

LAYOUTS = ("NP", "ED", "HD", "ED-local")
"""As published; ED-local is ED with the parameters of a stage on the stage's node."""

_MOST_NODES_TO_PAIR = 10
"""945 ways; more nodes are paired strongest with weakest."""


def distributions(
    devices: Sequence[StageDevice],
    speeds: Mapping[str, float],
    layout: str | None = None,
    most_workers: int | None = None,
) -> Iterator[tuple[str, Workers]]:
    """Ways to make virtual workers, with their names; of ED those with most of them first.

    Args:
        devices: Of one or more nodes.
        speeds: Device type -> speed, in any unit.
        layout: One of `LAYOUTS`; None for ED with any number, and NP and HD unless the number is
            given.
        most_workers: Of ED; by default as many as the smallest node has devices, or as there are
            devices if no layout is given.
    """
    if layout == "ED-local":
        devices = _alike_within_nodes(devices, speeds)
    for name in (layout,) if layout else ("ED",) if most_workers else ("ED", "NP", "HD"):
        if name == "NP":
            yield name, node_partition(devices)
        elif name == "HD":
            yield name, hybrid_distribution(devices, speeds)
        else:
            smallest = min(map(len, _by_node(devices).values())) if layout else len(devices)
            for number in range(min(most_workers or smallest, len(devices)), 0, -1):
                yield name, equal_distribution(devices, number)


def node_partition(devices: Sequence[StageDevice]) -> Workers:
    """NP: a virtual worker on each node."""
    return tuple(tuple(node) for node in _by_node(devices).values())


def equal_distribution(devices: Sequence[StageDevice], num_workers: int | None = None) -> Workers:
    """ED: the devices of each node are dealt to all virtual workers.

    Args:
        devices: Of one or more nodes.
        num_workers: How many; by default as many as the smallest node has devices. Where a node's
            devices can't be dealt evenly, the next node's are dealt on from there, so that numbers
            of devices differ by at most 1.

    Raises:
        ValueError: `num_workers` is below 1 or above the number of devices.
    """
    nodes = _by_node(devices)
    num = min(map(len, nodes.values())) if num_workers is None else num_workers
    check_number("num_workers", num, least=1, most=len(devices), whole=True)
    hands: list[list[StageDevice]] = [[] for _ in range(num)]
    for turn, device in enumerate(device for node in nodes.values() for device in node):
        hands[turn % num].append(device)
    return tuple(map(tuple, hands))


def hybrid_distribution(devices: Sequence[StageDevice], speeds: Mapping[str, float]) -> Workers:
    """HD: nodes in pairs of similar sums of speed and memory, each shared by 2 virtual workers.

    The paper pairs by hand; here the pairing is taken whose largest sums are least above its
    smallest ones, in the product for speed and memory. That is the paper's on its cluster. With
    an odd number of nodes one stays alone, as in NP.

    Args:
        devices: Of one or more nodes.
        speeds: Device type -> speed, in any unit.
    """
    nodes = list(_by_node(devices).values())
    pairings = _pairings(nodes) if len(nodes) <= _MOST_NODES_TO_PAIR else [_by_rank(nodes, speeds)]
    best = min(pairings, key=lambda pairing: _unlikeness(pairing, speeds))
    workers: list[tuple[StageDevice, ...]] = []
    for group in best:
        is_pair = len({device.node for device in group}) == 2
        workers += equal_distribution(group, 2) if is_pair else [tuple(group)]
    return tuple(workers)


def _alike_within_nodes(
    devices: Sequence[StageDevice], speeds: Mapping[str, float]
) -> list[StageDevice]:
    """All like the slowest of their node, with the least memory, so that stages are cut alike."""
    found: list[StageDevice] = []
    for node in _by_node(devices).values():
        slowest = min(node, key=lambda device: speeds[device.kind]).kind
        least = min(device.memory_bytes for device in node)
        found += [replace(device, kind=slowest, memory_bytes=least) for device in node]
    return found


Pairing = list[list[StageDevice]]


def _by_node(devices: Sequence[StageDevice]) -> dict[int, list[StageDevice]]:
    nodes: dict[int, list[StageDevice]] = {}
    for device in sorted(devices, key=lambda device: (device.node, device.index)):
        nodes.setdefault(device.node, []).append(device)
    return nodes


def _pairings(nodes: list[list[StageDevice]]) -> Iterator[Pairing]:
    if len(nodes) <= 1:
        yield [list(node) for node in nodes]
        return
    if len(nodes) % 2:
        for alone in range(len(nodes)):
            for rest in _pairings(nodes[:alone] + nodes[alone + 1 :]):
                yield [list(nodes[alone]), *rest]
        return
    first, *others = nodes
    for other in range(len(others)):
        for rest in _pairings(others[:other] + others[other + 1 :]):
            yield [[*first, *others[other]], *rest]


def _by_rank(nodes: list[list[StageDevice]], speeds: Mapping[str, float]) -> Pairing:
    ranked = sorted(nodes, key=lambda node: sum(speeds[d.kind] for d in node))
    half = len(ranked) // 2
    pairs = [
        [*low, *high] for low, high in zip(ranked[:half], ranked[: -half - 1 : -1], strict=True)
    ]
    return pairs + [list(node) for node in ranked[half : len(ranked) - half]]


def _unlikeness(pairing: Pairing, speeds: Mapping[str, float]) -> float:
    pace = [sum(speeds[device.kind] for device in group) for group in pairing]
    memory = [sum(device.memory_bytes for device in group) for group in pairing]
    bounded = max(memory) < float("inf")
    return max(pace) / min(pace) * (max(memory) / min(memory) if bounded else 1.0)
