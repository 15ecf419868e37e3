"""Virtual workers on the same nodes share these nodes' ports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from optuna_fleet.virtual_workers.layouts.distribution import Workers
from optuna_fleet.virtual_workers.layouts.prediction import pipeline_rate
from optuna_fleet.virtual_workers.partition import (
    Layers,
    Links,
    Partition,
    PartitionProblem,
    Stage,
    StageDevice,
    best_partition,
)

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
