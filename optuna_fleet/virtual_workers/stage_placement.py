"""Which layers are on which rank: how many virtual workers, and the stages of each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise

from optuna_fleet.virtual_workers.layouts import (
    Servers,
    can_be_local,
    distributions,
    flushed_s,
    partitions_under_load,
    sync_seconds,
    waves_rate,
)
from optuna_fleet.virtual_workers.partition import (
    DoesNotFit,
    Layers,
    Link,
    Links,
    Partition,
    PartitionProblem,
    StageDevice,
    Workers,
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
