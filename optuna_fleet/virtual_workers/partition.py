"""The partitioning problem, and its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
class Memory:
    """What a stage takes: weights in several copies, and what its minibatches keep.

    Attributes:
        copies: Copies of the weights whatever is in flight: the newest, their gradients, and what
            an optimizer keeps (1 more for momentum, 2 for Adam).
        keeps_versions: Whether there is one more for each minibatch in flight, as without flushes.
            Late stages hold fewer minibatches (the paper counts these), but know updates that no
            minibatch may see yet, so that all stages have the same weights.
    """

    copies: float = 2.0
    keeps_versions: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionProblem:
    """Layers are to be put on all of the devices, in any order of these.

    Attributes:
        layers: What they cost.
        devices: k of them; each gets one stage of at least one layer.
        in_flight: Minibatches in the pipeline, N_m; with flushes the parts of a batch.
        links: Ways between the devices.
        memory: What a stage takes.
    """

    layers: Layers
    devices: tuple[StageDevice, ...]
    in_flight: int = 1
    links: Links = field(default_factory=Links)
    memory: Memory = field(default_factory=Memory)

    def held(self, stage: int) -> int:
        """Most minibatches that a stage holds."""
        return held_minibatches(stage, len(self.devices), self.in_flight)

    def bytes_of(self, stage: int, parameter_bytes: float, kept_bytes: float) -> float:
        """Memory that a stage takes, by what its layers do."""
        copies = self.memory.copies + (self.in_flight if self.memory.keeps_versions else 0)
        return parameter_bytes * copies + kept_bytes * self.held(stage)


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


def stage_of(
    problem: PartitionProblem, order: tuple[StageDevice, ...], place: int, first: int, end: int
) -> Stage:
    """The stage of these layers at a place of an order of the devices."""
    layers, device, links = problem.layers, order[place], problem.links
    forward_s = sum(layers.forward_s[device.kind][first:end])
    backward_s = sum(layers.backward_s[device.kind][first:end])
    if place > 0:
        forward_s += links.of(order[place - 1], device).seconds(layers.cut_bytes[first - 1])
    if place + 1 < len(order):
        backward_s += links.of(order[place + 1], device).seconds(layers.cut_bytes[end - 1])
    return Stage(
        device=device,
        first=first,
        end=end,
        forward_s=forward_s,
        backward_s=backward_s,
        memory_bytes=problem.bytes_of(
            place, sum(layers.parameter_bytes[first:end]), sum(layers.kept_bytes[first:end])
        ),
    )


def partition_of(
    problem: PartitionProblem, order: tuple[StageDevice, ...], cuts: tuple[int, ...]
) -> Partition:
    """The partition with these cuts on an order of the devices, whether or not it fits."""
    bounds = (0, *cuts, len(problem.layers))
    places = range(len(order))
    return Partition(
        stages=tuple(stage_of(problem, order, q, bounds[q], bounds[q + 1]) for q in places)
    )
