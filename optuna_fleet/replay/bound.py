"""A lower bound for any schedule: the clairvoyant, fluid, malleable optimum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from optuna_fleet.alloc.fluid import fluid_optimum, fluid_seconds
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
        total = sum(num_by_kind.values())
        rates = [
            {k: t.rates_on(k)[: total if t.spans_types else n] for k, n in num_by_kind.items()}
            for t in trials
        ]
        fluid_s = fluid_seconds(rates, work, num_by_kind)
    else:
        num_by_kind = {"": num_devices}
        fluid_s, _ = fluid_optimum([t.rates for t in trials], work, num_devices)
    return max(fluid_s, *(t.submit_s + t.work / _fastest(t, num_by_kind) for t in trials))


def _fastest(trial: SimulatedTrial, num_by_kind: Mapping[str, int]) -> float:
    """On the devices that suit it best."""
    on_one_type = max(max(trial.rates_on(kind)[:n]) for kind, n in num_by_kind.items())
    if not trial.spans_types:
        return on_one_type
    most = min(sum(num_by_kind.values()), len(trial.rates))
    return max(on_one_type, *(_fastest_on(m, trial, num_by_kind) for m in range(1, most + 1)))


def _fastest_on(m: int, trial: SimulatedTrial, num_by_kind: Mapping[str, int]) -> float:
    """On `m` devices, of several types where one has not so many."""
    chosen: dict[str, int] = {}
    for kind in sorted(num_by_kind, key=lambda kind: -trial.rates_on(kind)[m - 1]):
        chosen[kind] = min(num_by_kind[kind], m - sum(chosen.values()))
    return trial.rate_on(chosen)
