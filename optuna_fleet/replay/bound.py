"""A lower bound for any schedule: the clairvoyant, fluid, malleable optimum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from optuna_fleet.alloc.fluid import Rates, fluid_optimum
from optuna_fleet.replay.workload import SimulatedTrial


def lower_bound_s(trials: Sequence[SimulatedTrial], num_devices: int | Mapping[str, int]) -> float:
    """No schedule is shorter, however clever: moves are free, and every length is known.

    With several device types each trial trains as fast as on those that suit it best, wherever
    it is: there the bound is not as sharp.

    Args:
        trials: At least one.
        num_devices: Devices of the fleet, or of each device type.

    Returns:
        Seconds: the fluid optimum of all the work, or the latest a trial can end that starts as it
        is submitted and flies alone.
    """
    num_by_kind = num_devices if isinstance(num_devices, Mapping) else {"": num_devices}
    total = sum(num_by_kind.values())
    rates = [_best_rates(t, num_by_kind, total) for t in trials]
    fluid_s, _ = fluid_optimum(rates, [t.work for t in trials], total)
    alone = (t.submit_s + t.work / max(own) for t, own in zip(trials, rates, strict=True))
    return max(fluid_s, *alone)


def _best_rates(trial: SimulatedTrial, num_by_kind: Mapping[str, int], total: int) -> Rates:
    """Of each number of devices, on those of as many that suit it best."""
    most = total if trial.spans_types else max(num_by_kind.values())
    widths = range(1, min(most, len(trial.rates)) + 1)
    return tuple(_best_rate(trial, m, num_by_kind) for m in widths)


def _best_rate(trial: SimulatedTrial, m: int, num_by_kind: Mapping[str, int]) -> float:
    if not trial.spans_types:
        return max(trial.rates_on(kind)[m - 1] for kind, n in num_by_kind.items() if n >= m)
    chosen: dict[str, int] = {}
    for kind in sorted(num_by_kind, key=lambda kind: -trial.rates_on(kind)[m - 1]):
        chosen[kind] = min(num_by_kind[kind], m - sum(chosen.values()))
    return trial.rate_on(chosen)
