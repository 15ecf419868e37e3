"""How many minibatches a pipeline has memory for."""

from __future__ import annotations

from dataclasses import replace

from optuna_fleet.alloc.partition.problem import (
    DoesNotFit,
    Partition,
    PartitionProblem,
    partition_of,
)
from optuna_fleet.alloc.partition.search import best_partition


def largest_in_flight(problem: PartitionProblem) -> int:
    """Most minibatches in flight for which some partition fits (section 4: Max_m), at most 2k - 1.

    More than 2k - 1 would keep the pipeline no fuller: see
    :func:`optuna_fleet.wsp.credits.held_minibatches`.

    Args:
        problem: Its `in_flight` is not looked at.

    Raises:
        DoesNotFit: Not even one minibatch fits.
    """
    return len(partitions_by_in_flight(problem))


def partitions_by_in_flight(problem: PartitionProblem) -> tuple[Partition, ...]:
    """The best partition for 1, 2, ... minibatches in flight, as far as there is memory.

    Raises:
        DoesNotFit: Not even one minibatch fits.
    """
    found = [best_partition(replace(problem, in_flight=1))]
    for in_flight in range(2, 2 * len(problem.devices)):
        fuller = replace(problem, in_flight=in_flight)
        # Fewer partitions fit: as long as the best one does, it stays the best.
        best = found[-1]
        same = partition_of(fuller, tuple(stage.device for stage in best.stages), best.cuts)
        try:
            found.append(same if same.fits else best_partition(fuller))
        except DoesNotFit:
            break
    return tuple(found)
