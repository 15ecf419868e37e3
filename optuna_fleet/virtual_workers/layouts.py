"""Which devices become which virtual worker: the policies of HetPipe's section 8.1.

With flushes weights change when all parts of a batch are through, so gradients are exact with the
whole model on each device or a stage of it: what is expected to be faster is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from optuna_fleet.virtual_workers.partition import (
    DoesNotFit,
    Partition,
    PartitionProblem,
    StageDevice,
    Workers,
    best_partition,
    partition_of,
)
from optuna_fleet.virtual_workers.predictions import all_reduce_s, fits_on_each
from optuna_fleet.virtual_workers.wsp import held_minibatches

LAYOUTS = ("NP", "ED", "HD", "ED-local")
"""As published; ED-local is ED with the parameters of a stage on the stage's node."""

_ASKED = "stages were asked for, or layers keep what they have seen"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Virtual workers, and how long they are expected to take.

    Attributes:
        name: For people.
        partitions: The stages of each.
        shares: Of each, how many of a batch's parts; none if all have as many.
        held: Minibatches that a stage has memory for between their two passes.
        in_flight: Parts of a batch; without flushes, minibatches in each virtual worker.
        batch_s: Seconds that a batch is expected to take.
    """

    name: str = ""
    partitions: tuple[Partition, ...]
    shares: tuple[int, ...] = ()
    held: int = 1
    in_flight: int
    batch_s: float


def best_flushed_layout(
    problem: PartitionProblem, *, may_replicate: bool = True, exchanged_bytes: float = 0.0
) -> tuple[Layout, str]:
    """The layout that is expected to be faster, and why, for people.

    Args:
        problem: Of the layers of one part of a batch.
        may_replicate: Whether each device may have the whole model.
        exchanged_bytes: What a pipeline sends at each flush, beside what goes from stage to stage.

    Raises:
        DoesNotFit: Neither fits.
    """
    num = len(problem.devices)
    whole, why_not = _replicated(problem) if may_replicate else (None, _ASKED)
    try:
        stages = _pipelined(problem, exchanged_bytes)
    except DoesNotFit as error:
        if whole is None:
            raise
        return whole, f"{num} x 1, as there is no pipeline: {error}"
    if whole is None:
        return stages, f"1 x {num}, as {why_not}."
    return (
        min((whole, stages), key=lambda layout: layout.batch_s),
        f"{num} x 1 is expected to take {1e3 * whole.batch_s:.3g} ms for a batch, "
        f"1 x {num} {1e3 * stages.batch_s:.3g} ms.",
    )


def _replicated(problem: PartitionProblem) -> tuple[Layout | None, str]:
    """Each device with the whole model and some of the parts; or None, and why not."""
    layers, devices = problem.layers, problem.devices
    if len(devices) > problem.in_flight:
        return None, f"a batch has {problem.in_flight} parts"
    if not fits_on_each(layers, devices, problem.memory):
        return None, "the model does not fit on each device"
    part_s = [sum(layers.forward_s[d.kind]) + sum(layers.backward_s[d.kind]) for d in devices]
    shares = shares_of(part_s, problem.in_flight)
    slowest_s = max(share * one_s for share, one_s in zip(shares, part_s, strict=True))
    sync_s = all_reduce_s(sum(layers.parameter_bytes), devices, problem.links)
    wholes = tuple(partition_of(replace(problem, devices=(d,)), (d,), ()) for d in devices)
    batch_s = slowest_s + sync_s
    num = problem.in_flight
    return Layout(partitions=wholes, shares=shares, in_flight=num, batch_s=batch_s), ""


def shares_of(part_s: Sequence[float], num_parts: int) -> tuple[int, ...]:
    """Parts of each device, at least one, so that the last one to end does so as early as can be.

    Args:
        part_s: Seconds that each device takes for a part.
        num_parts: At least as many as there are devices.
    """
    shares = [1] * len(part_s)
    for _ in range(num_parts - len(part_s)):
        ends_s = [(share + 1) * one_s for share, one_s in zip(shares, part_s, strict=True)]
        shares[ends_s.index(min(ends_s))] += 1
    return tuple(shares)


def _pipelined(problem: PartitionProblem, exchanged_bytes: float) -> Layout:
    """A stage on each device; where memory is short, stages may hold fewer parts at a time.

    Raises:
        DoesNotFit: The devices have too little memory, or are more than the layers.
    """
    num = len(problem.devices)
    if num > len(problem.layers):
        raise DoesNotFit(
            f"{num} devices are more than the {len(problem.layers)} stages that the model can be "
            "cut into."
        )
    freest, least_s = _pipeline(problem, exchanged_bytes, held=1)
    found = [freest]
    # More than 2 k - 1 keep it no fuller.
    for held in (problem.in_flight, *range(min(problem.in_flight, 2 * num - 1) - 1, 1, -1)):
        with suppress(DoesNotFit):
            layout, slowest_s = _pipeline(problem, exchanged_bytes, held)
            found.append(layout)
            if slowest_s <= least_s:
                break
    return min(found, key=lambda layout: layout.batch_s)


def _pipeline(
    problem: PartitionProblem, exchanged_bytes: float, held: int
) -> tuple[Layout, float]:
    """The best one whose stages hold so many parts, and the time of its slowest stage."""
    partition = best_partition(replace(problem, in_flight=held))
    stage_s = [stage.seconds for stage in partition.stages]
    exchange_s = all_reduce_s(exchanged_bytes, problem.devices, problem.links)
    batch_s = flushed_s(stage_s, problem.in_flight, held) + exchange_s
    num = problem.in_flight
    layout = Layout(partitions=(partition,), held=held, in_flight=num, batch_s=batch_s)
    return layout, partition.slowest_s


def flushed_s(stage_s: Sequence[float], num_parts: int, held: int) -> float:
    """Seconds of a pipeline for a batch of so many parts, from flush to flush.

    The first part takes the time of all stages. Each of the others follows as fast as the slowest
    stage is, or where memory is short, as parts come back to a stage that waits for them.
    """
    num = len(stage_s)
    limits = (sum(stage_s[q:]) / held_minibatches(q, num, held) for q in range(num))
    return sum(stage_s) + (num_parts - 1) * max(*stage_s, *limits)
