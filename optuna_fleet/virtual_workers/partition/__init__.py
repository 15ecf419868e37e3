"""Layers to stages on unlike devices (HetPipe, section 7)."""

from optuna_fleet.virtual_workers.partition.partition_problem import (
    DoesNotFit,
    Layers,
    Link,
    Links,
    Memory,
    Partition,
    PartitionProblem,
    Stage,
    StageDevice,
)
from optuna_fleet.virtual_workers.partition.search import best_partition, largest_in_flight

__all__ = [
    "DoesNotFit",
    "Layers",
    "Link",
    "Links",
    "Memory",
    "Partition",
    "PartitionProblem",
    "Stage",
    "StageDevice",
    "best_partition",
    "largest_in_flight",
]
