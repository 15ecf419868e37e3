"""Layers to stages on unlike devices (HetPipe, section 7): the problem, and its best answer.

That is found over all orders of the devices, by dynamic programming over sets of them. After some
stages only this matters for the rest: which devices are used, the last of them, how many layers
are covered, and whether the next device is on the last one's node, as that decided the last
stage's time. Devices that are equal (node, type, memory) are not told apart, and of nodes that
have the same the first comes first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from optuna_fleet.exceptions import FleetError
from optuna_fleet.virtual_workers.wsp import held_minibatches


class DoesNotFit(FleetError):  # noqa: N818 - names what is the matter, as AllocationFailed does
    """No partition fits into the memory of the devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """Costs of a chain of L layers, for one minibatch.

    Attributes:
        forward_s: Device type -> seconds of each layer's forward pass.
        backward_s: Device type -> seconds of each layer's backward pass.
        cut_bytes: What crosses a cut behind each layer, whatever layers made it; the gradients
            that come back are as large. That behind the last layer counts for nothing.
        parameter_bytes: Size of each layer's parameters.
        kept_bytes: What each layer keeps between a forward pass and its backward pass.
    """

    forward_s: Mapping[str, tuple[float, ...]]
    backward_s: Mapping[str, tuple[float, ...]]
    cut_bytes: tuple[float, ...]
    parameter_bytes: tuple[float, ...]
    kept_bytes: tuple[float, ...]

    def __len__(self) -> int:
        """Number of layers."""
        return len(self.cut_bytes)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class StageDevice:
    """A device that a stage may be on.

    Attributes:
        index: Number of the device in the fleet.
        node: Number of its node.
        kind: Device type, of which `Layers` knows the times.
        memory_bytes: What a stage may take of its memory.
    """

    index: int
    node: int
    kind: str
    memory_bytes: float = float("inf")


Workers = tuple[tuple[StageDevice, ...], ...]
"""Devices of each virtual worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A way between two devices: a message takes ``latency_s`` + its bytes / ``bytes_per_s``."""

    bytes_per_s: float = float("inf")
    latency_s: float = 0.0

    def seconds(self, num_bytes: float) -> float:
        """Time of one message."""
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The two kinds of ways: within a node, and between nodes."""

    within: Link = field(default_factory=Link)
    between: Link = field(default_factory=Link)

    def of(self, one: StageDevice, other: StageDevice) -> Link:
        """The way between two devices."""
        return self.within if one.node == other.node else self.between


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionProblem:
    """Layers are to be put on all of the devices, in any order of these.

    Attributes:
        layers: What they cost.
        devices: k of them; each gets one stage of at least one layer.
        in_flight: Minibatches in the pipeline, N_m; with flushes the parts of a batch.
        links: Ways between the devices.
        copies: Of a stage's weights in its memory: the newest, their gradients, what an optimizer
            keeps (1 more for momentum, 2 for Adam), and without flushes one for each minibatch in
            flight. Late stages hold fewer minibatches (the paper counts these), but know updates
            that no minibatch may see yet, so that all stages have the same weights.
    """

    layers: Layers
    devices: tuple[StageDevice, ...]
    in_flight: int = 1
    links: Links = field(default_factory=Links)
    copies: float = 2.0

    def held(self, stage: int) -> int:
        """Most minibatches that a stage holds."""
        return held_minibatches(stage, len(self.devices), self.in_flight)

    def bytes_of(self, stage: int, parameter_bytes: float, kept_bytes: float) -> float:
        """Memory that a stage takes, by what its layers do."""
        return parameter_bytes * self.copies + kept_bytes * self.held(stage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Layers ``first`` up to, without, ``end`` on a device.

    The times of a pass include receiving its input, as the paper counts them (section 7).
    """

    device: StageDevice
    first: int
    end: int
    forward_s: float
    backward_s: float
    memory_bytes: float

    @property
    def seconds(self) -> float:
        """Time that one minibatch takes on the device."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Stages in the order of the layers."""

    stages: tuple[Stage, ...]

    @property
    def slowest_s(self) -> float:
        """Time of the slowest stage: a full pipeline ends one minibatch in it."""
        return max(stage.seconds for stage in self.stages)

    @property
    def cuts(self) -> tuple[int, ...]:
        """Where stages end, without the last."""
        return tuple(stage.end for stage in self.stages[:-1])


def partition_of(
    problem: PartitionProblem, order: tuple[StageDevice, ...], cuts: tuple[int, ...]
) -> Partition:
    """The partition with these cuts on an order of the devices, whether or not it fits."""
    layers, links, stages = problem.layers, problem.links, []
    for place, (first, end) in enumerate(pairwise((0, *cuts, len(layers)))):
        device, its = order[place], slice(first, end)
        forward_s = sum(layers.forward_s[device.kind][its])
        backward_s = sum(layers.backward_s[device.kind][its])
        if place > 0:
            forward_s += links.of(order[place - 1], device).seconds(layers.cut_bytes[first - 1])
        if place + 1 < len(order):
            backward_s += links.of(order[place + 1], device).seconds(layers.cut_bytes[end - 1])
        sizes = sum(layers.parameter_bytes[its]), sum(layers.kept_bytes[its])
        stage = Stage(
            device=device,
            first=first,
            end=end,
            forward_s=forward_s,
            backward_s=backward_s,
            memory_bytes=problem.bytes_of(place, *sizes),
        )
        stages.append(stage)
    return Partition(stages=tuple(stages))


FloatArray = NDArray[np.float64]
Used = tuple[int, ...]
"""How many devices of each group are used."""


def best_partition(problem: PartitionProblem) -> Partition:
    """The partition whose slowest stage is fastest, of those that fit, over all orders of devices.

    Raises:
        DoesNotFit: None fits into the devices' memory.
    """
    found = _Search(problem).run()
    if found is None:
        raise DoesNotFit(_why(problem))
    return partition_of(problem, *found)


class _Ending(NamedTuple):
    """The last stage so far: its group of devices, and if the next is on the same node."""

    group: int
    stays: bool


class _Search:
    """``_best[used][ending][e]``: least time of the slowest stage that covers e layers."""

    def __init__(self, problem: PartitionProblem) -> None:
        self._problem = problem
        self._tables = _Tables(problem)
        groups: dict[tuple[object, ...], list[StageDevice]] = {}
        for device in sorted(problem.devices):
            key = (device.node, device.kind, device.memory_bytes)
            groups.setdefault(key, []).append(device)
        self._groups = list(groups.values())
        self._twins = _twins(self._groups)
        self._num = len(problem.devices)
        self._best: dict[Used, dict[_Ending, FloatArray]] = {}

    def run(self) -> tuple[tuple[StageDevice, ...], tuple[int, ...]] | None:
        """An order of the devices and cuts; None if nothing fits."""
        frontier = [(0,) * len(self._groups)]
        for place in range(self._num):
            reached: dict[Used, None] = {}
            for used in frontier:
                for group in self._left(used):
                    after = _with(used, group)
                    self._extend(used, group, after, place)
                    reached[after] = None
            frontier = list(reached)
        (full,) = frontier
        return self._trace_back(full)

    def _left(self, used: Used) -> Iterator[int]:
        """Groups that may be next."""
        nodes = [devices[0].node for devices in self._groups]
        begun = {node for node, number in zip(nodes, used, strict=True) if number}
        for group, node in enumerate(nodes):
            may_begin = node in begun or self._twins[node] <= begun
            if may_begin and used[group] < len(self._groups[group]):
                yield group

    def _extend(self, used: Used, group: int, after: Used, place: int) -> None:
        """All stages on a device of the group that follow what was found for `used`."""
        best = self._best.setdefault(after, {})
        for before, start in self._starts(used, group, place):
            for ending, link_out in self._endings(after, group):
                table = self._tables.of(self._groups[group][0], place, before, link_out)
                found = np.maximum(start, table).min(axis=1)
                best[ending] = np.minimum(best.get(ending, np.inf), found)

    def _starts(
        self, used: Used, group: int, place: int
    ) -> Iterator[tuple[Link | None, FloatArray]]:
        """What may come before, by the way that the stage is reached on."""
        if place == 0:
            nothing = np.full(len(self._problem.layers) + 1, np.inf)
            nothing[0] = 0.0
            yield None, nothing
            return
        for stays in (True, False):
            fitting = [
                best
                for ending, best in self._best[used].items()
                if ending.stays is stays is self._share_node(ending.group, group)
            ]
            if fitting:
                yield self._link(stays), np.minimum.reduce(fitting)

    def _endings(self, after: Used, group: int) -> Iterator[tuple[_Ending, Link | None]]:
        left = [self._share_node(group, other) for other in self._left(after)]
        if not left:
            yield _Ending(group, False), None
        for stays in set(left):
            yield _Ending(group, stays), self._link(stays)

    def _link(self, stays: bool) -> Link:
        return self._problem.links.within if stays else self._problem.links.between

    def _share_node(self, one: int, other: int) -> bool:
        return self._groups[one][0].node == self._groups[other][0].node

    def _trace_back(self, full: Used) -> tuple[tuple[StageDevice, ...], tuple[int, ...]] | None:
        end = len(self._problem.layers)
        used, ending = full, min(self._best[full], key=lambda e: self._best[full][e][end])
        if not np.isfinite(self._best[full][ending][end]):
            return None
        order, cuts = [ending.group], list[int]()
        for place in range(self._num - 1, 0, -1):
            used, ending, end = self._step_back(used, ending, end, place)
            order.append(ending.group)
            cuts.append(end)
        left = [list(devices) for devices in self._groups]
        devices = tuple(left[group].pop(0) for group in reversed(order))
        return devices, tuple(reversed(cuts))

    def _step_back(
        self, used: Used, ending: _Ending, end: int, place: int
    ) -> tuple[Used, _Ending, int]:
        """Where the stage that ends like this begins, and what came before."""
        device = self._groups[ending.group][0]
        target = self._best[used][ending][end]
        link_out = None if place == self._num - 1 else self._link(ending.stays)
        earlier = tuple(n - (g == ending.group) for g, n in enumerate(used))
        for before, best in self._best[earlier].items():
            if before.stays is not self._share_node(before.group, ending.group):
                continue
            table = self._tables.of(device, place, self._link(before.stays), link_out)
            first = int(np.argmin(np.maximum(best, table[end])))
            if max(best[first], table[end, first]) == target:
                return earlier, before, first
        raise AssertionError("a value of the search that nothing leads to")


class _Tables:
    """Times of stages by their layers, `inf` where the memory does not suffice."""

    def __init__(self, problem: PartitionProblem) -> None:
        layers = problem.layers
        self._problem = problem
        self._seconds = {
            kind: _sums(np.add(layers.forward_s[kind], layers.backward_s[kind]))
            for kind in {device.kind for device in problem.devices}
        }
        self._parameters = _sums(np.array(layers.parameter_bytes))
        self._kept = _sums(np.array(layers.kept_bytes))
        self._cut = np.array((0.0, *layers.cut_bytes))
        self._made: dict[tuple[object, ...], FloatArray] = {}

    def of(
        self, device: StageDevice, place: int, link_in: Link | None, link_out: Link | None
    ) -> FloatArray:
        """``table[e, i]``: time of layers i up to, without, e."""
        key = (device.kind, device.memory_bytes, place, link_in, link_out)
        if (made := self._made.get(key)) is not None:
            return made
        received = np.array([link_in.seconds(b) if link_in else 0.0 for b in self._cut])
        returned = np.array([link_out.seconds(b) if link_out else 0.0 for b in self._cut])
        problem = self._problem
        copies, held = problem.bytes_of(place, 1.0, 0.0), problem.held(place)
        needed = copies * self._parameters + held * self._kept
        table = self._seconds[device.kind] + received[None, :] + returned[:, None]
        table[needed > device.memory_bytes] = np.inf
        table[np.triu_indices(len(self._cut))] = np.inf  # no stage is empty
        self._made[key] = np.ascontiguousarray(table)
        return self._made[key]


def _sums(numbers: FloatArray) -> FloatArray:
    """``sums[e, i]``: sum of numbers i up to, without, e."""
    total = np.concatenate(([0.0], np.cumsum(numbers)))
    return np.subtract(total[:, None], total[None, :])


def _with(used: Used, group: int) -> Used:
    return tuple(n + (g == group) for g, n in enumerate(used))


def _twins(groups: Sequence[Sequence[StageDevice]]) -> dict[int, set[int]]:
    """Of each node those before it that have the same devices."""
    has: dict[int, set[tuple[str, float, int]]] = {}
    for devices in groups:
        first = devices[0]
        has.setdefault(first.node, set()).add((first.kind, first.memory_bytes, len(devices)))
    return {n: {m for m in has if m < n and has[m] == own} for n, own in has.items()}


def _why(problem: PartitionProblem) -> str:
    layers, last = problem.layers, len(problem.devices) - 1
    least = problem.bytes_of(last, sum(layers.parameter_bytes), sum(layers.kept_bytes))
    there = sum(device.memory_bytes for device in problem.devices)
    return (
        f"No partition of {len(layers)} layers on {len(problem.devices)} devices fits into their "
        f"memory with {problem.in_flight} minibatches in flight: with one in each stage the "
        f"layers take {least / 1e9:.3g} GB, the devices have {there / 1e9:.3g} GB. More devices, "
        "a smaller batch or fewer minibatches in flight may help."
    )
