"""Which layers are on which rank: how many virtual workers, and the stages of each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest

from optuna_fleet.virtual_workers.layouts import (
    Layout,
    best_flushed_layout,
    distributions,
)
from optuna_fleet.virtual_workers.partition import (
    DoesNotFit,
    Layers,
    Link,
    Links,
    Memory,
    Partition,
    PartitionProblem,
    StageDevice,
    Workers,
)
from optuna_fleet.virtual_workers.predictions import (
    Servers,
    best_partitions,
    can_be_local,
    partitions_under_load,
    waves_rate,
)

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
        leaves_something: Whether passes change its buffers, but for BatchNorm's statistics, or its
            weights.
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
        shares: Of each virtual worker, how many of a batch's parts; none if all have as many.
        reason: Why, for people.
        is_free: The user has not said how many virtual workers there are to be.
    """

    cuts: tuple[tuple[int, ...], ...]
    ranks: tuple[tuple[int, ...], ...]
    held: int
    in_flight: int
    shares: tuple[int, ...] = ()
    reason: str = ""
    is_free: bool = False


class TooManyDevices(DoesNotFit):
    """The model has fewer parts than a virtual worker has devices."""


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
        in_flight: Minibatches in a pipeline; with flushes, those of all pipelines together. None
            for as many as there is memory for, and as help.
        memory: Copies of the weights.
        memory_bytes: Of each device; infinite if that does not matter.
        is_flushed: Virtual workers share the parts of each batch, and step together.
        most_workers: Virtual workers at most: as many as there is memory for. None for as many as
            are fastest.
        layout: One of `LAYOUTS`; None for the fastest.
        most_devices: That the trial can have.
        clock_distance: Between these, without flushes.
        may_replicate: With flushes each device may have the whole model, where that is faster.
        links: Ways between the devices.
        untied: Blocks with which no layers are parted that share a parameter.
        tied_bytes: What each flush sends if they are parted.
    """

    blocks: tuple[int, ...]
    in_flight: int | None
    memory: Memory
    memory_bytes: float
    is_flushed: bool = True
    most_workers: int | None = 1
    layout: str | None = None
    most_devices: int = 1
    clock_distance: int = 0
    may_replicate: bool = False
    links: Links = _LINKS
    untied: tuple[int, ...] = ()
    tied_bytes: float = 0.0

    def fewest_stages(self, costs: Sequence[LayerCost], most: int) -> int | None:
        """How many of the same device hold the model; None if not even `most` of them do."""
        alone = replace(
            self, most_workers=1, layout=None, may_replicate=False, in_flight=self.in_flight or 1
        )
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
        passes = layers.forward_s, layers.backward_s
        speeds = {kind: 1 / sum(sum(one[kind]) for one in passes) for kind in layers.forward_s}
        found: list[Layout] = []
        refusal: DoesNotFit = TooManyDevices(
            f"There are more devices than parts of the model: {num}."
        )
        is_free = self.most_workers is None and self.layout is None
        for name, workers in distributions(devices, speeds, self.layout, self.most_workers):
            if max(map(len, workers)) > len(layers):
                continue
            try:
                found.append(self._placed(layers, name, workers))
            except DoesNotFit as error:
                refusal = error
            if found and not is_free:
                break
        if not found:
            raise refusal
        best = min(found, key=lambda layout: layout.batch_s)
        return self._placement(ranks, best, _in_words(best) if is_free else "", is_free=is_free)

    def _placement(
        self, ranks: Sequence[int], layout: Layout, reason: str, *, is_free: bool = False
    ) -> Placement:
        workers = [
            (
                tuple(ranks[stage.device.index] for stage in own.stages),
                tuple(self.blocks[cut - 1] for cut in own.cuts),
                share,
            )
            for own, share in zip_longest(layout.partitions, layout.shares)
        ]
        on, cuts, shares = zip(*sorted(workers, key=lambda worker: min(worker[0])), strict=True)
        return Placement(
            ranks=on,
            cuts=cuts,
            shares=shares if layout.shares else (),
            held=layout.held,
            in_flight=layout.in_flight,
            reason=reason,
            is_free=is_free,
        )

    def _faster(self, costs: Sequence[Sequence[LayerCost]], on: Ranks) -> Placement:
        """The whole model on each rank or a stage of it, with all of a batch's parts."""
        assert self.in_flight is not None
        found: list[tuple[Layout, str, Demand]] = []
        refusal: DoesNotFit | None = None
        ways = [self]
        if self.untied not in ((), self.blocks):
            ways.append(replace(self, blocks=self.untied, tied_bytes=0.0))
        for demand in ways:
            layers, ranks, devices = demand._given(costs, on)
            problem = self._problem(layers, (tuple(devices),), self.in_flight, self.in_flight)
            try:
                best, why = best_flushed_layout(
                    problem, may_replicate=self.may_replicate, exchanged_bytes=demand.tied_bytes
                )
                found.append((best, why, demand))
            except DoesNotFit as error:
                refusal = refusal or error
        if not found:
            assert refusal is not None
            raise refusal
        best, why, demand = min(found, key=lambda way: way[0].batch_s)
        return demand._placement(ranks, best, why)

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

    def _placed(self, layers: Layers, name: str, workers: Workers) -> Layout:
        if not self.is_flushed:
            layers = _share_of(layers, len(workers))
        in_flight = self.in_flight or self._most_that_help(layers, workers)
        through = in_flight  # each pipeline; with flushes they share the parts of a batch
        if self.is_flushed:
            through = -(-in_flight // len(workers))
        for held in range(through, 0, -1):
            try:
                problem = self._problem(layers, workers, through, held)
                partitions = partitions_under_load(problem, workers)
            except DoesNotFit:
                if held == 1:
                    raise
            else:
                break
        if self.layout == "ED-local" and not can_be_local(partitions):
            raise DoesNotFit(f"{len(workers)} virtual workers have layers on unlike nodes.")
        return Layout(
            name=name,
            partitions=partitions,
            held=held,
            in_flight=in_flight,
            batch_s=self._batch_s(layers, partitions, in_flight),
        )

    def _most_that_help(self, layers: Layers, workers: Workers) -> int:
        """N_m: where memory is not short, it does not depend on times.

        An even pipeline is full with a minibatch for each stage. More make pushes rarer, until
        stages hold no more.
        """
        num = max(map(len, workers))
        batches_s: dict[int, float] = {}
        least_s = -math.inf
        for number in [1, *range(num if len(workers) == 1 else 2 * num - 1, 1, -1)]:
            try:
                problem = self._problem(layers, workers, number, number)
                partitions = best_partitions(problem, workers)
            except DoesNotFit:
                if number == 1:
                    raise
                continue
            batches_s[number] = self._batch_s(layers, partitions, number)
            slowest_s = max(partition.slowest_s for partition in partitions)
            if slowest_s <= least_s:  # as if there were memory without end: fewer do not help
                break
            least_s = slowest_s if number == 1 else least_s
        return min(batches_s, key=lambda number: batches_s[number])

    def _problem(
        self, layers: Layers, workers: Workers, in_flight: int, held: int
    ) -> PartitionProblem:
        memory = self.memory
        if memory.keeps_versions:  # as many as are in flight, however few are held
            waves = self.clock_distance + 3 if len(workers) > 1 else 0
            memory = replace(memory, copies=memory.copies + in_flight - held + waves)
        return PartitionProblem(
            layers=layers, devices=workers[0], in_flight=held, links=self.links, memory=memory
        )

    def _batch_s(self, layers: Layers, partitions: Sequence[Partition], in_flight: int) -> float:
        """Each virtual worker has its share of every batch."""
        servers = Servers.LOCAL if can_be_local(partitions) else Servers.ROUND_ROBIN
        rate = waves_rate(partitions, layers, self.links, in_flight, servers)
        return len(partitions) / rate


def _in_words(chosen: Layout) -> str:
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
