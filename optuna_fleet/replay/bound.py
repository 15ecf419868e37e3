"""A lower bound for any schedule: the clairvoyant, fluid, malleable optimum."""

from __future__ import annotations

from collections.abc import Sequence

from optuna_fleet.alloc.fluid import fluid_optimum
from optuna_fleet.replay.workload import SimulatedTrial


def lower_bound_s(trials: Sequence[SimulatedTrial], num_devices: int) -> float:
    """No schedule is shorter, however clever: moves are free, and every length is known.

    Args:
        trials: At least one.
        num_devices: Devices of the fleet.

    Returns:
        Seconds: the fluid optimum of all the work, or the latest a trial can end that starts as it
        is submitted and flies alone.
    """
    fluid_s, _ = fluid_optimum([t.rates for t in trials], [t.work for t in trials], num_devices)
    return max(fluid_s, *(t.submit_s + t.work / max(t.rates[:num_devices]) for t in trials))
