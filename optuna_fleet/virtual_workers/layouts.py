"""Which devices become which virtual worker: the policies of HetPipe's section 8.1."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from optuna_fleet.virtual_workers.partition import StageDevice, Workers

LAYOUTS = ("NP", "ED", "HD", "ED-local")
"""As published; ED-local is ED with the parameters of a stage on the stage's node."""


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
    """
    nodes = _by_node(devices)
    num = min(map(len, nodes.values())) if num_workers is None else num_workers
    hands: list[list[StageDevice]] = [[] for _ in range(num)]
    for turn, device in enumerate(device for node in nodes.values() for device in node):
        hands[turn % num].append(device)
    return tuple(map(tuple, hands))


def hybrid_distribution(devices: Sequence[StageDevice], speeds: Mapping[str, float]) -> Workers:
    """HD: nodes in pairs of similar sums of speed and memory, each shared by 2 virtual workers.

    The paper pairs by hand; here the strongest is with the weakest, by the product of speed and
    memory, and so on. That is the paper's pairing on its cluster. With an odd number of nodes the
    one in the middle stays alone, as in NP.

    Args:
        devices: Of one or more nodes.
        speeds: Device type -> speed, in any unit.
    """

    def strength(node: list[StageDevice]) -> float:
        memory = sum(device.memory_bytes for device in node)
        speed = sum(speeds[device.kind] for device in node)
        return speed * (memory if math.isfinite(memory) else 1.0)

    ranked = sorted(_by_node(devices).values(), key=strength)
    half = len(ranked) // 2
    workers: list[tuple[StageDevice, ...]] = []
    for weak, strong in zip(ranked[:half], ranked[: -half - 1 : -1], strict=True):
        workers += equal_distribution([*weak, *strong], 2)
    return tuple(sorted(workers + [tuple(node) for node in ranked[half : len(ranked) - half]]))


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


def _by_node(devices: Sequence[StageDevice]) -> dict[int, list[StageDevice]]:
    nodes: dict[int, list[StageDevice]] = {}
    for device in sorted(devices, key=lambda device: (device.node, device.index)):
        nodes.setdefault(device.node, []).append(device)
    return nodes
