"""What a simulation came to: plain numbers for people and for `--json`, and a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from optuna_fleet.alloc.fluid import Rates, fluid_optimum
from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.replay.progress import Progress, Totals
from optuna_fleet.replay.simulation import Outcome
from optuna_fleet.replay.workload import SimulatedTrial
from optuna_fleet.visualization.figure import figure_of
from optuna_fleet.visualization.timeline import Bar, Mark, Timeline


def common_report(outcome: Outcome) -> dict[str, Any]:
    """What every report has.

    Returns:
        `makespan_s`; `trials` that ended; `rescales`; `rounds`, plans that were carried out;
        `decisions`; `idle_s` and `waiting_s`, mean seconds per device that was there; `solver_s`
        (median, p99, max, total), the only wall times.
    """
    totals = outcome.totals
    ended = [p for p in outcome.trials.values() if p.ended_s is not None]
    devices = max(1, len(totals.present_s))
    present, busy = sum(totals.present_s.values()), sum(totals.busy_s.values())
    return {
        "makespan_s": outcome.end_s,
        "trials": len(ended),
        "rescales": sum(p.rescales for p in outcome.trials.values()),
        "rounds": max((span.round for span in totals.spans), default=0),
        "decisions": len(totals.solve_s),
        "idle_s": (present - busy) / devices,
        "waiting_s": totals.waited_s / devices,
        "solver_s": solver_times(totals),
    }


def solver_times(totals: Totals) -> dict[str, float]:
    """Median, 99th percentile and maximum wall time of a decision, and of all, in seconds."""
    times = totals.solve_s or [0.0]
    return {
        "median": float(np.median(times)),
        "p99": float(np.quantile(times, 0.99)),
        "max": float(np.max(times)),
        "total": float(np.sum(times)),
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


_COLUMNS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "policy": lambda report: report["policy"],
    "makespan_s": lambda report: report["makespan_s"],
    "ratio_to_bound": lambda report: report.get("ratio_to_bound"),
    "speedup_over_baseline": lambda report: report.get("speedup_over_baseline"),
    "utilisation": lambda report: report.get("utilisation"),
    "trials": lambda report: report["trials"],
    "rounds": lambda report: report["rounds"],
    "decisions": lambda report: report["decisions"],
    "waiting_and_idle_s": lambda report: report["waiting_s"] + report["idle_s"],
    "solver_s.total": lambda report: report["solver_s"]["total"],
}


def rows(reports: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """A table of policies, line by line: what all reports have of the columns."""
    titles: list[str] = []
    for report in reports:
        cells = {title: cell for title, of in _COLUMNS.items() if (cell := of(report)) is not None}
        if not titles:
            titles = list(cells)
            yield "  ".join(f"{title:<11}" for title in titles)
        shown = [_shown(cells.get(title, "-")) for title in titles]
        widths = (max(11, len(title)) for title in titles)
        yield "  ".join(f"{text:<{width}}" for text, width in zip(shown, widths, strict=True))


def lines(report: dict[str, Any], prefix: str = "") -> list[str]:
    """The report as aligned lines of text."""
    text = []
    for name, value in report.items():
        if isinstance(value, dict):
            text += lines(value, prefix=f"{prefix}{name}.")
        else:
            text.append(f"{prefix + name:<28} {_shown(value)}")
    return text


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def save_gantt(outcome: Outcome, path: Path, name: str) -> None:
    """Save devices over time, coloured by trial, as a page for a browser.

    Raises:
        FleetConfigError: The file can't be written, or its name says that it is something else.
    """
    if path.suffix != ".html":
        raise FleetConfigError(f"{path} would be a page for a browser: please name it *.html.")
    try:
        figure_of(Timeline(name=name, bars=tuple(_bars(outcome)))).write_html(path)
    except OSError as error:
        raise FleetConfigError(f"{path} can't be written: {error.strerror}.") from error


def _bars(outcome: Outcome) -> Iterator[Bar]:
    for span in sorted(outcome.totals.spans, key=lambda span: (span.start_s, span.number)):
        for device in span.devices:
            yield Bar(
                number=span.number,
                row=("", device),
                start_s=span.start_s,
                end_s=span.end_s,
                round=span.round,
                mark=None if span.has_returned else Mark.MOVED,
            )
