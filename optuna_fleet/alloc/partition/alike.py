"""Virtual workers with alike devices are partitioned alike, so that is found out once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from optuna_fleet.alloc.partition.problem import Partition, PartitionProblem, Stage, StageDevice
from optuna_fleet.alloc.partition.search import best_partition

Shape = tuple[tuple[int, str, float], ...]


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
    found: dict[Shape, Partition] = {}
    for devices in workers:
        if shape_of(devices) not in found:
            found[shape_of(devices)] = best_partition(replace(problem, devices=devices))
    return tuple(on_devices(found[shape_of(devices)], devices) for devices in workers)


def shape_of(devices: Sequence[StageDevice]) -> Shape:
    """What a partition depends on."""
    return tuple(sorted((d.node, d.kind, d.memory_bytes) for d in devices))


def on_devices(partition: Partition, devices: Sequence[StageDevice]) -> Partition:
    """The same partition on devices of the same shape."""
    left = sorted(devices)

    def moved(stage: Stage) -> Stage:
        shape = shape_of([stage.device])
        own = next(device for device in left if shape_of([device]) == shape)
        left.remove(own)
        return replace(stage, device=own)

    return Partition(stages=tuple(map(moved, partition.stages)))
