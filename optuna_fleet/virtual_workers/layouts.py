"""Which devices become which virtual worker (HetPipe, section 8.1), and how fast they will be.

So, of a trial: how many virtual workers, and which layers are on which rank.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise

from optuna_fleet.virtual_workers.partition import (
    DoesNotFit,
    Layers,
    Link,
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
        speeds: Of device types, in any unit.
        layout: None for ED with any number, and NP and HD unless the number is given.
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

    By default to as many as the smallest node has devices. Where a node's devices can't be dealt
    evenly, the next node's are dealt on from there, so that numbers differ by at most 1.
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

    A clock distance lets the fast ones run ahead for a while only. What is in flight in each is a
    wave; `held` is as in `pipeline_rate`.
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
    in turns. The `devices` of the problem are not looked at.

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
    """The best partition of each virtual worker, whatever the `devices` of the problem are.

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


# -- which layers are on which rank ---------------------------------------------------------------

WIRE = Link(bytes_per_s=1e9, latency_s=2e-4)  # gloo on one machine, measured, with Python's part
_LINKS = Links(within=WIRE, between=WIRE)
_ALIKE = 1.25  # times that differ by less are taken for noise
_ALIKE_BYTES = 1.02  # and memory: devices that are told apart take many times as long to deal out


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """Of one layer, for one minibatch.

    Attributes:
        forward_s: Seconds of its forward pass.
        backward_s: Seconds of its backward pass.
        output_bytes: What it gives to the next layer.
        parameter_bytes: Size of its parameters.
        kept_bytes: What it keeps between the two passes.
        leaves_something: Passes change its buffers, and not only as BatchNorm's do.
    """

    forward_s: float
    backward_s: float
    output_bytes: float
    parameter_bytes: float
    kept_bytes: float
    leaves_something: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Virtual workers, that of rank 0 first, and their stages in their order.

    Attributes:
        cuts: Of each virtual worker, where its stages end, in layers, without the last.
        ranks: Of each virtual worker, the rank of each stage.
        held: Minibatches that each stage has memory for between their two passes.
        in_flight: Parts of a batch; without flushes, minibatches in each virtual worker.
        reason: Why, for people, where they have not said what it is to be.
    """

    cuts: tuple[tuple[int, ...], ...]
    ranks: tuple[tuple[int, ...], ...]
    held: int
    in_flight: int
    reason: str = ""


class TooManyDevices(DoesNotFit):
    """The model has fewer parts than a virtual worker has devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Where the ranks of a trial are."""

    nodes: tuple[int, ...]
    memory_bytes: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """Virtual workers, with the partition of each, and the seconds that a batch is to take."""

    name: str
    partitions: tuple[Partition, ...]
    held: int
    in_flight: int
    batch_s: float

    @property
    def slowest_s(self) -> float:
        return max(partition.slowest_s for partition in self.partitions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What pipelines take.

    Attributes:
        blocks: Where each run of layers ends that must stay together.
        in_flight: Parts of a batch; without flushes, minibatches in each pipeline, None for as
            many as there is memory for, and as help.
        copies: Of the weights, whatever is in flight.
        memory_bytes: Of each device; infinite if that does not matter.
        clock_distance: Between virtual workers without flushes; None with flushes: they share the
            parts of a batch.
        most_workers: Virtual workers at most: as many as there is memory for. None for as many as
            are fastest.
        layout: One of `LAYOUTS`; None for the fastest.
        most_devices: That the trial can have.
        links: Ways between the devices.
    """

    blocks: tuple[int, ...]
    in_flight: int | None
    copies: float
    memory_bytes: float
    clock_distance: int | None = None
    most_workers: int | None = 1
    layout: str | None = None
    most_devices: int = 1
    links: Links = _LINKS

    @property
    def is_flushed(self) -> bool:
        """See `PipelineOptions`."""
        return self.clock_distance is None

    def fewest_stages(self, costs: Sequence[LayerCost], most: int) -> int | None:
        """How many of the same device hold the model; None if not even `most` of them do."""
        alone = replace(self, most_workers=1, layout=None, in_flight=self.in_flight or 1)
        for number in range(1, min(most, len(self.blocks)) + 1):
            with suppress(DoesNotFit):
                alone.place([costs] * number)
                return number
        return None

    def most_below(self, costs: Sequence[LayerCost], number: int) -> int | None:
        """How many of the same device, less than `number`, the model can be dealt out to."""
        for fewer in range(number - 1, 0, -1):
            with suppress(DoesNotFit):
                self.place([costs] * fewer)
                return fewer
        return None

    def place(self, costs: Sequence[Sequence[LayerCost]], on: Ranks | None = None) -> Placement:
        """One stage on each rank; where memory is short, stages hold fewer minibatches.

        Args:
            costs: Of all layers, as each rank has measured them.
            on: The ranks; by default all are on one node, with `memory_bytes` each.

        Raises:
            DoesNotFit: The devices have too little memory.
        """
        num = len(costs)
        on = on or Ranks(nodes=(0,) * num, memory_bytes=(self.memory_bytes,) * num)
        layers, ranks, devices = self._given(costs, on)
        passes = layers.forward_s, layers.backward_s
        speeds = {kind: 1 / sum(sum(one[kind]) for one in passes) for kind in layers.forward_s}
        found: list[_Layout] = []
        refusal: DoesNotFit = TooManyDevices(
            f"There are more devices than parts of the model: {num}."
        )
        is_free = self.most_workers is None and self.layout is None
        for name, workers in distributions(devices, speeds, self.layout, self.most_workers):
            has_parts = not self.is_flushed or len(workers) <= (self.in_flight or 1)
            if max(map(len, workers)) > len(layers) or not has_parts:
                continue
            shares = layers if self.is_flushed else _share_of(layers, len(workers))
            try:
                found.append(self._placed(shares, name, workers))
            except DoesNotFit as error:
                refusal = error
            if found and not is_free:
                break
        if not found:
            raise refusal
        best = min(found, key=lambda layout: layout.batch_s)
        reason = _in_words(best) if is_free and not self.is_flushed else ""
        return self._placement(ranks, best, reason)

    def _placement(self, ranks: Sequence[int], layout: _Layout, reason: str) -> Placement:
        workers = [
            (
                tuple(ranks[stage.device.index] for stage in own.stages),
                tuple(self.blocks[cut - 1] for cut in own.cuts),
            )
            for own in layout.partitions
        ]
        on, cuts = zip(*sorted(workers, key=lambda worker: min(worker[0])), strict=True)
        held, in_flight = layout.held, layout.in_flight
        return Placement(ranks=on, cuts=cuts, held=held, in_flight=in_flight, reason=reason)

    def _placed(self, layers: Layers, name: str, workers: Workers) -> _Layout:
        """The fastest of those whose stages hold one minibatch at a time, or more.

        Where memory is not short, that does not depend on times: more than 2 k - 1 keep a pipeline
        no fuller. If their number is free, k do for an even pipeline that is alone; beside others
        more make pushes rarer.
        """
        stages = max(map(len, workers))
        most = stages if self.in_flight is None and len(workers) == 1 else 2 * stages - 1
        found = [self._layout(layers, name, workers, held=1)]
        if self.in_flight is not None:
            through = self.in_flight / (len(workers) if self.is_flushed else 1)
            most = min(most, math.ceil(through))
        for held in range(most, 1, -1):
            with suppress(DoesNotFit):
                found.append(self._layout(layers, name, workers, held))
                if found[-1].slowest_s <= found[0].slowest_s:  # as if memory were without end
                    break
        return min(found, key=lambda layout: layout.batch_s)

    def _layout(self, layers: Layers, name: str, workers: Workers, held: int) -> _Layout:
        in_flight, copies, num = self.in_flight or held, self.copies, len(workers)
        if self.clock_distance is not None:  # versions: as many as are in flight, and of waves
            copies += in_flight + (self.clock_distance + 3 if num > 1 else 0)
        problem = PartitionProblem(
            layers=layers, devices=workers[0], in_flight=held, links=self.links, copies=copies
        )
        partitions = partitions_under_load(problem, workers)
        are_local = can_be_local(partitions)
        if self.layout == "ED-local" and not are_local:
            raise DoesNotFit(f"{num} virtual workers have layers on unlike nodes.")
        servers = Servers.LOCAL if are_local else Servers.ROUND_ROBIN
        if self.clock_distance is None:
            syncs = sync_seconds(partitions, layers, self.links, servers) if num > 1 else ()
            # Sums go around twice, layer by layer, while others are at the layers before.
            laps = 2 * (1 + (num - 1) / len(layers))
            batch_s = laps * max(map(max, syncs), default=0.0) + max(
                flushed_s([stage.seconds for stage in its.stages], -(-in_flight // num), held)
                for its in partitions
            )
        else:
            rate = waves_rate(partitions, layers, self.links, in_flight, servers, held)
            batch_s = num / rate  # each has its share of every batch
        return _Layout(
            name=name, partitions=partitions, held=held, in_flight=in_flight, batch_s=batch_s
        )

    def _given(
        self, costs: Sequence[Sequence[LayerCost]], on: Ranks
    ) -> tuple[Layers, list[int], list[StageDevice]]:
        """The costs by kind of device, and ranks with their devices in the order to be dealt."""
        kinds = _kinds(costs)
        blocks = {kind: self._in_blocks(costs[kind]) for kind in set(kinds)}
        of_any = blocks[kinds[0]]
        layers = Layers(
            forward_s={str(k): tuple(c.forward_s for c in own) for k, own in blocks.items()},
            backward_s={str(k): tuple(c.backward_s for c in own) for k, own in blocks.items()},
            cut_bytes=tuple(cost.output_bytes for cost in of_any),
            parameter_bytes=tuple(cost.parameter_bytes for cost in of_any),
            kept_bytes=tuple(cost.kept_bytes for cost in of_any),
        )
        ranks = sorted(range(len(costs)), key=lambda rank: (on.nodes[rank], kinds[rank], rank))
        memory = _least_alike(on.memory_bytes)
        devices = [
            StageDevice(
                index=index,
                node=on.nodes[rank],
                kind=str(kinds[rank]),
                memory_bytes=memory[rank],
            )
            for index, rank in enumerate(ranks)
        ]
        return layers, ranks, devices

    def _in_blocks(self, costs: Sequence[LayerCost]) -> list[LayerCost]:
        return [_sum(costs[first:end]) for first, end in pairwise((0, *self.blocks))]


def _in_words(chosen: _Layout) -> str:
    sizes = sorted({len(partition.stages) for partition in chosen.partitions})
    stages = " or ".join(map(str, sizes))
    return (
        "`clock_distance` alone takes the layout that is expected to be the fastest: here "
        f"{len(chosen.partitions)} x {stages} ({chosen.name}; virtual workers x stages), with "
        f"{chosen.in_flight} in flight. `virtual_workers` and `layout` give another."
    )


def _share_of(layers: Layers, number: int) -> Layers:
    """With one of as many parts of each batch; parameters stay as large."""

    def some(costs: Iterable[float]) -> tuple[float, ...]:
        return tuple(cost / number for cost in costs)

    return Layers(
        forward_s={kind: some(seconds) for kind, seconds in layers.forward_s.items()},
        backward_s={kind: some(seconds) for kind, seconds in layers.backward_s.items()},
        cut_bytes=some(layers.cut_bytes),
        parameter_bytes=layers.parameter_bytes,
        kept_bytes=some(layers.kept_bytes),
    )


def _kinds(costs: Sequence[Sequence[LayerCost]]) -> list[int]:
    """Of each rank the first one that is about as fast."""
    totals = [sum(c.forward_s + c.backward_s for c in own) for own in costs]
    kinds: list[int] = []
    for rank, total in enumerate(totals):
        alike = (k for k in kinds if max(total, totals[k]) <= _ALIKE * min(total, totals[k]))
        kinds.append(next(alike, rank))
    return kinds


def _least_alike(sizes: Sequence[float]) -> list[float]:
    """Of each the least that is about as large."""
    least = 0.0
    found: dict[float, float] = {}
    for size in sorted(sizes):
        if size > _ALIKE_BYTES * least:
            least = size
        found[size] = least
    return [found[size] for size in sizes]


def _sum(costs: Sequence[LayerCost]) -> LayerCost:
    return LayerCost(
        forward_s=math.fsum(cost.forward_s for cost in costs),
        backward_s=math.fsum(cost.backward_s for cost in costs),
        output_bytes=costs[-1].output_bytes,
        parameter_bytes=math.fsum(cost.parameter_bytes for cost in costs),
        kept_bytes=math.fsum(cost.kept_bytes for cost in costs),
    )
