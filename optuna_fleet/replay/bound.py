"""A lower bound for any schedule: the clairvoyant, fluid, malleable optimum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from optuna_fleet.alloc.fluid import fluid_optimum
from optuna_fleet.alloc.fluid_kinds import fluid_seconds
from optuna_fleet.replay.workload import SimulatedTrial


def lower_bound_s(trials: Sequence[SimulatedTrial], num_devices: int | Mapping[str, int]) -> float:
    """No schedule is shorter, however clever: moves are free, and every length is known.

    Args:
        trials: At least one.
        num_devices: Devices of the fleet, or of each device type.

    Returns:
        Seconds: the fluid optimum of all the work, or the latest a trial can end that starts as it
        is submitted and flies alone.
    """
    work = [t.work for t in trials]
    if isinstance(num_devices, Mapping):
        num_by_kind = num_devices
        rates = [{kind: t.rates_on(kind) for kind in num_by_kind} for t in trials]
        fluid_s = fluid_seconds(rates, work, num_by_kind)
    else:
        num_by_kind = {"": num_devices}
        fluid_s, _ = fluid_optimum([t.rates for t in trials], work, num_devices)
    return max(fluid_s, *(t.submit_s + t.work / _fastest(t, num_by_kind) for t in trials))


def _fastest(trial: SimulatedTrial, num_by_kind: Mapping[str, int]) -> float:
    return max(max(trial.rates_on(kind)[:n]) for kind, n in num_by_kind.items())
