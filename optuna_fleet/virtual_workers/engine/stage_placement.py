"""Which layers are on which rank: how many virtual workers, and the stages of each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

from optuna_fleet.virtual_workers.engine.costs import LayerCost
from optuna_fleet.virtual_workers.layouts.contention import partitions_under_load
from optuna_fleet.virtual_workers.layouts.distribution import (
    Workers,
    equal_distribution,
    hybrid_distribution,
    node_partition,
)
from optuna_fleet.virtual_workers.layouts.flushed import (
    FlushedLayout,
    FlushedProblem,
    best_flushed_layout,
)
from optuna_fleet.virtual_workers.layouts.prediction import waves_rate
from optuna_fleet.virtual_workers.layouts.servers import Servers, can_be_local
from optuna_fleet.virtual_workers.partition import (
    DoesNotFit,
    Layers,
    Link,
    Links,
    Memory,
    Partition,
    PartitionProblem,
    StageDevice,
)

WIRE = Link(bytes_per_s=1e9, latency_s=2e-4)  # gloo on one machine, measured, with Python's part
_LINKS = Links(within=WIRE, between=WIRE)
_ALIKE = 1.25  # times that differ by less are taken for noise
_ALIKE_BYTES = 1.02  # and memory: devices that are told apart take many times as long to deal out
_STATES = {"SGD": 1, "Adagrad": 1, "RMSprop": 2, "Rprop": 2}  # copies; of others, as Adam, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Virtual workers, that of rank 0 first, and their stages in their order.

    Attributes:
        cuts: Of each virtual worker, where its stages end, in layers, without the last.
        ranks: Of each virtual worker, the rank of each stage.
        held: Minibatches that each stage has memory for between their two passes.
        shares: Of each virtual worker, how many of a batch's parts; none if all have as many.
        reason: Why, for people.
    """

    cuts: tuple[tuple[int, ...], ...]
    ranks: tuple[tuple[int, ...], ...]
    held: int
    shares: tuple[int, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Where the ranks of a trial are."""

    nodes: tuple[int, ...]
    memory_bytes: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What pipelines take.

    Attributes:
        blocks: Where each run of layers ends that must stay together.
        in_flight: Minibatches in a pipeline; with flushes, those of all pipelines together.
        memory: Copies of the weights.
        memory_bytes: Of each device; infinite if that does not matter.
        is_flushed: Virtual workers share the parts of each batch, and step together.
        most_workers: Virtual workers at most: as many as there is memory for. None for as many as
            are fastest.
        most_devices: That the trial can have.
        clock_distance: Between these, without flushes.
        may_replicate: With flushes each device may have the whole model, where that is faster.
        links: Ways between the devices.
        untied: Blocks with which no layers are parted that share a parameter.
        tied_bytes: What each flush sends if they are parted.
    """

    blocks: tuple[int, ...]
    in_flight: int
    memory: Memory
    memory_bytes: float
    is_flushed: bool = True
    most_workers: int | None = 1
    most_devices: int = 1
    clock_distance: int = 0
    may_replicate: bool = False
    links: Links = _LINKS
    untied: tuple[int, ...] = ()
    tied_bytes: float = 0.0

    def fewest_stages(self, costs: Sequence[LayerCost], most: int) -> int | None:
        """How many of the same device hold the model; None if not even `most` of them do."""
        alone = replace(self, most_workers=1, may_replicate=False)
        for number in range(1, min(most, len(self.blocks)) + 1):
            try:
                alone.place([costs] * number)
            except DoesNotFit:
                continue
            return number
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
        if self.is_flushed and self.most_workers == 1:
            return self._faster(costs, on)
        layers, ranks, devices = self._given(costs, on)
        found: list[_Candidate] = []
        refusal = DoesNotFit(f"There are more devices than parts of the model: {len(costs)}.")
        for workers in self._distributions(layers, devices):
            try:
                found.append(self._placed(layers, workers))
            except DoesNotFit as error:
                refusal = error
            if found and self.most_workers is not None:
                break
        if not found:
            raise refusal
        best = max(found, key=lambda candidate: candidate.batches_per_s)
        places = [tuple(ranks[s.device.index] for s in own.stages) for own in best.partitions]
        cuts = [tuple(self.blocks[cut - 1] for cut in own.cuts) for own in best.partitions]
        in_order = sorted(zip(places, cuts, strict=True), key=lambda worker: min(worker[0]))
        return Placement(
            cuts=tuple(cuts for _, cuts in in_order),
            ranks=tuple(places for places, _ in in_order),
            held=best.held,
        )

    def _faster(self, costs: Sequence[Sequence[LayerCost]], on: Ranks) -> Placement:
        """The whole model on each rank or a stage of it, with all of a batch's parts."""
        found: list[tuple[FlushedLayout, Demand]] = []
        refusal: DoesNotFit | None = None
        ways = [self]
        if self.untied not in ((), self.blocks):
            ways.append(replace(self, blocks=self.untied, tied_bytes=0.0))
        for demand in ways:
            layers, ranks, devices = demand._given(costs, on)
            problem = FlushedProblem(
                layers=layers,
                devices=tuple(devices),
                num_parts=self.in_flight,
                links=self.links,
                memory=self.memory,
                may_replicate=self.may_replicate,
                exchanged_bytes=demand.tied_bytes,
            )
            try:
                found.append((best_flushed_layout(problem), demand))
            except DoesNotFit as error:
                refusal = refusal or error
        if not found:
            assert refusal is not None
            raise refusal
        best, demand = min(found, key=lambda candidate: candidate[0].batch_s)
        if best.partition is None:
            of_rank = dict(zip(ranks, best.shares, strict=True))
            return Placement(
                cuts=((),) * len(ranks),
                ranks=tuple((rank,) for rank in sorted(ranks)),
                held=1,
                shares=tuple(of_rank[rank] for rank in sorted(ranks)),
                reason=best.reason,
            )
        stages = best.partition.stages
        return Placement(
            cuts=(tuple(demand.blocks[cut - 1] for cut in best.partition.cuts),),
            ranks=(tuple(ranks[stage.device.index] for stage in stages),),
            held=best.held,
            reason=best.reason,
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

    def _distributions(self, layers: Layers, devices: Sequence[StageDevice]) -> Iterator[Workers]:
        """Who may get which devices, most virtual workers first."""
        most = min(self.most_workers or len(devices), len(devices))
        ways = [equal_distribution(devices, number) for number in range(most, 0, -1)]
        if self.most_workers is None:
            speeds = {kind: 1 / sum(seconds) for kind, seconds in layers.backward_s.items()}
            ways += [node_partition(devices), hybrid_distribution(devices, speeds)]
        yield from (workers for workers in ways if max(map(len, workers)) <= len(layers))

    def _placed(self, layers: Layers, workers: Workers) -> _Candidate:
        in_flight = self.in_flight
        if self.is_flushed:  # all pipelines share the parts of a batch
            in_flight = -(-in_flight // len(workers))
        else:
            layers = _share_of(layers, len(workers))
        for held in range(in_flight, 0, -1):
            try:
                partitions = self._partitions(layers, workers, in_flight, held)
            except DoesNotFit:
                if held == 1:
                    raise
            else:
                break
        return _Candidate(partitions, held, self._rate(layers, partitions))

    def _partitions(
        self, layers: Layers, workers: Workers, in_flight: int, held: int
    ) -> tuple[Partition, ...]:
        memory = self.memory
        if memory.keeps_versions:  # as many as are in flight, however few are held
            waves = self.clock_distance + 3 if len(workers) > 1 else 0
            memory = replace(memory, copies=memory.copies + in_flight - held + waves)
        problem = PartitionProblem(
            layers=layers, devices=workers[0], in_flight=held, links=self.links, memory=memory
        )
        return partitions_under_load(problem, workers)

    def _rate(self, layers: Layers, partitions: Sequence[Partition]) -> float:
        """Batches per second; each virtual worker has its share of every batch."""
        servers = Servers.LOCAL if can_be_local(partitions) else Servers.ROUND_ROBIN
        rate = waves_rate(partitions, layers, self.links, self.in_flight, servers)
        return rate / len(partitions)


class _Candidate(NamedTuple):
    partitions: tuple[Partition, ...]
    held: int
    batches_per_s: float


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


def memory_of(optimizer: torch.optim.Optimizer, *, is_flushed: bool) -> Memory:
    """Copies of the weights: themselves, gradients, the optimizer's state, versions."""
    kind = type(optimizer).__name__
    states = _STATES.get(kind, 2)
    if kind == "SGD" and not any(group["momentum"] for group in optimizer.param_groups):
        states = 0
    return Memory(copies=(2 if is_flushed else 3) + states, keeps_versions=not is_flushed)


def blocks_of(model: nn.Sequential, *, may_part_ties: bool) -> tuple[int, ...]:
    """Where runs of layers end that can't be cut, as they share something.

    Args:
        model: Its layers.
        may_part_ties: Whether layers that share a parameter may be in several stages. Those that
            share a module with parameters or buffers never are.
    """
    last: dict[int, int] = {}
    first: dict[int, int] = {}
    for place, layer in enumerate(model):
        for key in _held_by(layer, may_part_ties=may_part_ties):
            first.setdefault(key, place)
            last[key] = place
    spans = [(first[key], last[key]) for key in first]
    return tuple(
        end
        for end in range(1, len(model) + 1)
        if not any(begins < end <= ends for begins, ends in spans)
    )


def _held_by(layer: nn.Module, *, may_part_ties: bool) -> Iterator[int]:
    for module in layer.modules():
        if module._parameters or module._buffers:
            yield id(module)
    if not may_part_ties:
        yield from map(id, layer.parameters())


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
