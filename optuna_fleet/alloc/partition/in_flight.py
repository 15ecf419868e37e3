"""How many minibatches a pipeline has memory for."""

from __future__ import annotations

from dataclasses import replace

from optuna_fleet.alloc.partition.problem import (
    DoesNotFit,
    PartitionProblem,
    partition_of,
)
from optuna_fleet.alloc.partition.search import best_partition


def largest_in_flight(problem: PartitionProblem) -> int:
    """Most minibatches in flight for which some partition fits (section 4: Max_m), at most 2k - 1.

    More than 2k - 1 would keep the pipeline no fuller: see
    :func:`optuna_fleet.wsp.turns.held_minibatches`.

    Args:
        problem: Its `in_flight` is not looked at.

    Raises:
        DoesNotFit: Not even one minibatch fits.
    """
    best = best_partition(replace(problem, in_flight=1))
    most = 2 * len(problem.devices) - 1
    for in_flight in range(2, most + 1):
        fuller = replace(problem, in_flight=in_flight)
        # As long as the best one fits, it need not be looked for.
        devices = tuple(stage.device for stage in best.stages)
        if not partition_of(fuller, devices, best.cuts).fits:
            try:
                best = best_partition(fuller)
            except DoesNotFit:
                return in_flight - 1
    return most
