"""Which devices become which virtual worker (HetPipe, section 8.1), and how fast they will be."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum

from optuna_fleet.virtual_workers.partition import (
    Layers,
    Links,
    Partition,
    PartitionProblem,
    Stage,
    StageDevice,
    Workers,
    best_partition,
)
from optuna_fleet.virtual_workers.wsp import held_minibatches

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


# -- how fast pipelines are, with pushes and pulls ------------------------------------------------


def pipeline_rate(stage_s: Sequence[float], held: int) -> float:
    """Minibatches per second of one virtual worker without flushes.

    A stage that holds at most f minibatches, which come back after the time of all stages from it
    on, ends at most f of them in that time; and no pipeline is faster than its slowest stage.

    Args:
        stage_s: Seconds of each stage for one minibatch, with its share of pushes and pulls.
        held: Minibatches that stages have memory for; of all in flight, N_m, if it is not short.
    """
    return 1 / _follows_s(stage_s, held)


def flushed_s(stage_s: Sequence[float], num_parts: int, held: int) -> float:
    """Seconds of a pipeline for a batch of so many parts, from flush to flush.

    The first part takes the time of all stages; each of the others follows as in `pipeline_rate`.
    """
    return sum(stage_s) + (num_parts - 1) * _follows_s(stage_s, held)


def _follows_s(stage_s: Sequence[float], held: int) -> float:
    """Seconds from one minibatch to the next one in a full pipeline."""
    num = len(stage_s)
    limits = (sum(stage_s[q:]) / held_minibatches(q, num, held) for q in range(num))
    return max(*stage_s, *limits)


def waves_rate(
    workers: Sequence[Partition],
    layers: Layers,
    links: Links,
    in_flight: int,
    servers: Servers,
    held: int,
) -> float:
    """Minibatches per second of virtual workers without flushes; all go as fast as the slowest.

    A clock distance lets the fast ones run ahead for a while only.

    Args:
        workers: The stages of each.
        layers: What their layers cost.
        links: Ways between the devices.
        in_flight: Minibatches in flight in each, which are a wave.
        servers: Where the parameters are.
        held: As in `pipeline_rate`.
    """
    syncs = [[0.0] * len(worker.stages) for worker in workers]
    if len(workers) > 1:
        pushes = sync_seconds(workers, layers, links, servers)
        syncs = [[2 * push_s / in_flight for push_s in worker] for worker in pushes]
    stage_s = [
        [stage.seconds + sync_s for stage, sync_s in zip(worker.stages, its_syncs, strict=True)]
        for worker, its_syncs in zip(workers, syncs, strict=True)
    ]
    return len(workers) * min(pipeline_rate(times, held) for times in stage_s)


class Servers(Enum):
    """Where parameter servers are.

    Attributes:
        ROUND_ROBIN: Layer by layer on the nodes in turn (the paper's default).
        LOCAL: Those of a stage on the stage's node (ED-local); for virtual workers whose stages
            are cut alike and are on the same nodes.
    """

    ROUND_ROBIN = "round-robin"
    LOCAL = "local"


def can_be_local(workers: Sequence[Partition]) -> bool:
    """Whether every virtual worker has the same layers on the same nodes."""
    shapes = {tuple((s.device.node, s.first, s.end) for s in worker.stages) for worker in workers}
    return len(shapes) == 1


def sync_seconds(
    workers: Sequence[Partition], layers: Layers, links: Links, servers: Servers
) -> tuple[tuple[float, ...], ...]:
    """Seconds that each stage of each virtual worker takes to push a wave; a pull takes as long.

    All push at once. What a node sends to others, and what a server gets from others, goes through
    one port each, which serves its senders in turn: a stage with b bytes waits for at most b of
    each other one's.

    Args:
        workers: The stages of each virtual worker.
        layers: Whose parameters are pushed.
        links: Ways within a node and between nodes.
        servers: Where they are.
    """
    assert servers is not Servers.LOCAL or can_be_local(workers), "layers on unlike nodes"
    nodes = sorted({stage.device.node for worker in workers for stage in worker.stages})
    flows = [[_flows(stage, layers, nodes, servers) for stage in w.stages] for w in workers]
    ports: dict[tuple[str, int], list[float]] = defaultdict(list)
    for worker, its_flows in zip(workers, flows, strict=True):
        for stage, flow in zip(worker.stages, its_flows, strict=True):
            for port, size in _through(stage, flow).items():
                ports[port].append(size)

    def seconds(stage: Stage, flow: dict[int, float]) -> float:
        own = links.within.seconds(flow[stage.device.node]) if flow[stage.device.node] else 0.0
        queued = (
            links.between.seconds(sum(min(size, other) for other in ports[port]))
            for port, size in _through(stage, flow).items()
        )
        return max(own, *queued, 0.0)

    return tuple(
        tuple(map(seconds, worker.stages, its_flows))
        for worker, its_flows in zip(workers, flows, strict=True)
    )


def _flows(
    stage: Stage, layers: Layers, nodes: Sequence[int], servers: Servers
) -> dict[int, float]:
    """Node of the server -> bytes of the stage's parameters there."""
    found = dict.fromkeys(nodes, 0.0)
    for layer in range(stage.first, stage.end):
        is_local = servers is Servers.LOCAL
        node = stage.device.node if is_local else nodes[layer % len(nodes)]
        found[node] += layers.parameter_bytes[layer]
    return found


def _through(stage: Stage, flow: dict[int, float]) -> dict[tuple[str, int], float]:
    """Bytes through the ports of nodes: out of the stage's own, and into those of servers."""
    remote = {node: size for node, size in flow.items() if size and node != stage.device.node}
    if not remote:
        return {}
    into = {("in", node): size for node, size in remote.items()}
    return {("out", stage.device.node): sum(remote.values()), **into}


_ROUNDS = 12

_Shape = tuple[tuple[int, str, float], ...]


def partitions_under_load(problem: PartitionProblem, workers: Workers) -> tuple[Partition, ...]:
    """The best partition of each virtual worker, where the others use the same ports.

    Mean field: a port that each of n virtual workers uses for a share x of the time is slower by
    1 + (n - 1) x for each of them. Partitions and shares follow from each other, so they are found
    in turns.

    Args:
        problem: Its `devices` are not looked at.
        workers: Devices of each virtual worker.

    Raises:
        DoesNotFit: Some virtual worker has no partition that fits.
    """
    slower = 1.0
    found: tuple[Partition, ...] = ()
    for _ in range(_ROUNDS):
        between = problem.links.between
        slowed = replace(between, bytes_per_s=between.bytes_per_s / slower)
        links = replace(problem.links, between=slowed)
        found = best_partitions(replace(problem, links=links), workers)
        next_slower = 1.0 + _others_share(found, problem.layers, links, problem.in_flight)
        if abs(next_slower - slower) < 1e-3 * slower:
            break
        slower = (slower + next_slower) / 2
    return found


def best_partitions(
    problem: PartitionProblem, workers: Sequence[tuple[StageDevice, ...]]
) -> tuple[Partition, ...]:
    """The best partition of each virtual worker.

    Args:
        problem: Its `devices` are not looked at.
        workers: Devices of each virtual worker.

    Raises:
        DoesNotFit: One of them has none.
    """
    found: dict[_Shape, Partition] = {}
    for devices in workers:
        if _shape_of(devices) not in found:
            found[_shape_of(devices)] = best_partition(replace(problem, devices=devices))
    return tuple(_on_devices(found[_shape_of(devices)], devices) for devices in workers)


def _shape_of(devices: Sequence[StageDevice]) -> _Shape:
    """What a partition depends on."""
    return tuple(sorted((d.node, d.kind, d.memory_bytes) for d in devices))


def _on_devices(partition: Partition, devices: Sequence[StageDevice]) -> Partition:
    """The same partition on devices of the same shape."""
    left = sorted(devices)

    def moved(stage: Stage) -> Stage:
        shape = _shape_of([stage.device])
        own = next(device for device in left if _shape_of([device]) == shape)
        left.remove(own)
        return replace(stage, device=own)

    return Partition(stages=tuple(map(moved, partition.stages)))


def _others_share(
    workers: Sequence[Partition], layers: Layers, links: Links, in_flight: int
) -> float:
    """How many other virtual workers use a port at the same time, for the mean of its users."""
    shares: dict[int, list[float]] = {}
    for worker in workers:
        rate = pipeline_rate([stage.seconds for stage in worker.stages], in_flight)
        for place, stage in enumerate(worker.stages):
            received = _received_s(worker, place, layers, links)
            shares.setdefault(stage.device.node, []).append(min(1.0, rate * received))
    users = [sum(at_node) - share for at_node in shares.values() for share in at_node if share > 0]
    return sum(users) / len(users) if users else 0.0


def _received_s(worker: Partition, place: int, layers: Layers, links: Links) -> float:
    """Seconds in which a stage receives from other nodes, for one minibatch."""
    stage, seconds = worker.stages[place], 0.0
    neighbours = ((place - 1, stage.first - 1), (place + 1, stage.end - 1))
    for other, cut in neighbours:
        if not 0 <= other < len(worker.stages):
            continue
        if worker.stages[other].device.node != stage.device.node:
            seconds += links.between.seconds(layers.cut_bytes[cut])
    return seconds
