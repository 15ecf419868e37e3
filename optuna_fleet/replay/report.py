"""What a simulation came to, as plain numbers for people and for `--json`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from optuna_fleet.replay.progress import Progress, Totals
from optuna_fleet.replay.simulation import Outcome


def common_report(outcome: Outcome) -> dict[str, Any]:
    """What every report has.

    Returns:
        `makespan_s`; `trials` that ended; `rescales`; `decisions`; `idle_s` and `waiting_s`, mean
        seconds per device that was there; `solver_s` (median, p99, max), the only wall times.
    """
    totals = outcome.totals
    ended = [p for p in outcome.trials.values() if p.ended_s is not None]
    devices = max(1, len(totals.present_s))
    present, busy = sum(totals.present_s.values()), sum(totals.busy_s.values())
    return {
        "makespan_s": outcome.end_s,
        "trials": len(ended),
        "rescales": sum(p.rescales for p in outcome.trials.values()),
        "decisions": len(totals.solve_s),
        "idle_s": (present - busy) / devices,
        "waiting_s": totals.waited_s / devices,
        "solver_s": solver_times(totals),
    }


def solver_times(totals: Totals) -> dict[str, float]:
    """Median, 99th percentile and maximum wall time of a decision, in seconds."""
    times = totals.solve_s or [0.0]
    return {
        "median": float(np.median(times)),
        "p99": float(np.quantile(times, 0.99)),
        "max": float(np.max(times)),
    }


def utilisation(
    trials: Sequence[Progress], mean_nodes: float, max_trials: int, seconds: float
) -> float:
    """U of BFTrainer (section 4.1.2, Eq. 17 and 18): outcome over that of a static machine.

    The static machine has as many nodes as were idle on average, N_eq, shared equally by
    ``max_trials`` trials; rates between table entries are linear. Each model's samples count as
    the node-seconds they take there, so unlike models add up.

    Args:
        trials: Their samples are net of what moves and losses cost.
        mean_nodes: N_eq.
        max_trials: Trials at once.
        seconds: Length of the replay.

    Returns:
        A share; 1 is as good as the static machine.
    """
    share = mean_nodes / max_trials
    node_s = 0.0
    for progress in trials:
        rates = (0.0, *progress.trial.rates)
        node_s += progress.samples / float(np.interp(share, range(len(rates)), rates)) * share
    return node_s / (mean_nodes * seconds)


def lines(report: dict[str, Any], prefix: str = "") -> list[str]:
    """The report as aligned lines of text."""
    text = []
    for name, value in report.items():
        if isinstance(value, dict):
            text += lines(value, prefix=f"{prefix}{name}.")
        else:
            shown = f"{value:.6g}" if isinstance(value, float) else str(value)
            text.append(f"{prefix + name:<28} {shown}")
    return text
