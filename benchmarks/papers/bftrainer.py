"""BFTrainer (2021): Figures 1, 5, 7 to 16, Tables 1, 3 and 4.

Replayed on the recorded trace by the published rules: decisions only as nodes come and go, what a
move costs is charged at the old rate. U is Eq. 17 and 18; see `replay/scenarios.py`.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.papers.rows import Row, Span, Table, at_least, at_most
from benchmarks.problems import random_problem
from optuna_fleet.alloc import ElasticAllocator, EqualSplitAllocator
from optuna_fleet.policies import Elastic, Own
from optuna_fleet.replay.progress import Outcome, Progress
from optuna_fleet.replay.scenarios import TraceScenario, trace_report, utilisation
from optuna_fleet.replay.trace import SUMMIT_NODES, NodeTrace, load_trace, trace_statistics
from optuna_fleet.replay.workload import BFTRAINER_RATES, SimulatedTrial, bftrainer_trials

TITLE = "BFTrainer"
ABOUT = (
    "Liu et al., 2021. Replays of the published trace (1,024 nodes of Summit in a week) and "
    "workloads, by the published rules, with the optimum of each decision (`elastic`)."
)

IN_DATA = {
    "AlexNet": "AlexNet",
    "ResNet18": "resnet18",
    "MnasNet": "mnasnet1",
    "MobileNets": "mobilenet",
    "ShuffleNet": "shufflenet",
    "VGG-16": "vgg16",
    "DenseNet": "DenseNet",
}
"""Its names in `bftrainer_jobs.json`."""
AT_ONCE = (5, 10, 15, 20, 25, 30, 35)
"""P_jmax of Tables 3 and 4."""
HOURS = {
    "throughput": {
        "AlexNet": (0.5, 0.6, 0.5, 0.6, 0.5, 0.5, 0.6),
        "ResNet18": (0.4, 0.4, 0.4, 0.4, 0.5, 0.5, 0.5),
        "MnasNet": (0.7, 0.7, 0.8, 0.8, 0.9, 0.9, 1.1),
        "MobileNets": (0.8, 0.9, 0.8, 0.9, 1.0, 1.2, 1.4),
        "ShuffleNet": (0.9, 1.0, 0.9, 1.2, 1.4, 1.6, 1.8),
        "VGG-16": (2.3, 3.4, 4.1, 5.4, 6.1, 6.3, 7.4),
        "DenseNet": (4.1, 9.5, 16.1, 22.4, 29.2, 36.3, 42.3),
    },
    "scaling-efficiency": {
        "VGG-16": (1.98, 2.8, 3.3, 3.8, 4.5, 5.0, 5.2),
        "DenseNet": (2.58, 3.4, 4.6, 5.2, 6.4, 6.5, 7.8),
        "ResNet18": (0.77, 1.1, 1.5, 1.9, 2.1, 2.4, 2.6),
        "MobileNets": (0.89, 1.8, 2.7, 3.8, 4.7, 5.9, 7.4),
        "ShuffleNet": (1.15, 2.1, 2.9, 4.2, 5.4, 7.2, 8.5),
        "MnasNet": (1.15, 2.3, 3.8, 5.5, 7.0, 9.4, 10.7),
        "AlexNet": (0.94, 2.4, 3.9, 5.3, 6.8, 7.6, 8.8),
    },
}
"""Tables 3 and 4."""

_T_FWD_S = (10, 30, 120, 600)
_SHOWN_AT_ONCE = (5, 10, 35)
_COSTS = (2, 5, 10)
_HOUR_S = 3600.0
_WINDOW_S = 6 * _HOUR_S
_FIG15_S = 60 * _HOUR_S
SIMILAR: Span = (0.95, 1.05)

_NO_TRACE = "They need the published trace and jobs: `--trace FOLDER`."
_NODES = (
    "not known; which 1,024 of Summit's 4,608 nodes the paper took isn't published, here they are "
    "the first ones"
)
_ALL_NODES = (
    "the paper's are all nodes of Summit, here the first 1,024, which fewer events concern"
)
_MONTHS = "the paper's are two months, here one week"
_AGAIN = "the paper goes on with a second week, where the recorded one begins again here"
_STATIC = "the paper doesn't say what a trial of an unlike mix would do on the static machine"
_RUNTIMES = (
    "not known. That the published model's M is too small to move more than half as many nodes at "
    "once as are idle isn't it: tried, it changes little. Candidates: the paper's 1,024 nodes, "
    "and its second week, where the recorded one begins again here"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """What `--trace` has; if quick, of the first day."""

    quick: bool
    trace: NodeTrace
    equal: Sequence[SimulatedTrial]
    diverse: Sequence[SimulatedTrial]


def tables(quick: bool, folder: Path | None = None) -> Iterator[Table]:
    """All of them. Without data Figure 5 only; if quick, of the first day."""
    yield Table(title="Figure 5: time of a decision", rows=(_figure5(3 if quick else 11),))
    if folder is None:
        yield Table(title="Figures 1, 7 to 16, Tables 1, 3 and 4", rows=(), note=_NO_TRACE)
        return
    trace = load_trace(folder / "summit_idle_week1.npz")
    jobs = json.loads((folder / "bftrainer_jobs.json").read_text())
    data = Data(
        quick=quick,
        trace=_until(trace, 24 * _HOUR_S) if quick else trace,
        equal=_trials(jobs["scaling"], jobs["hpo_shufflenet"]),
        diverse=_trials(jobs["scaling"], jobs["diverse"]),
    )
    note = "The first day only, in which few nodes are idle." if quick else ""
    rows = tuple(_trace_rows(data.trace))
    yield Table(title="Figures 1 and 7a, Table 1: the trace", rows=rows, note=note)
    runs = _replay_all(data)
    yield Table(title="Figures 7b to 11: equal trials, by T_fwd", rows=tuple(_equal(data, runs)))
    rows = tuple(_diverse(runs))
    yield Table(title="Figures 12 to 14: seven models in turn", rows=rows)
    for number, objective in zip((3, 4), HOURS, strict=True):
        yield Table(
            title=f"Table {number}: hours of a trial, objective {objective}",
            rows=tuple(_hours(f"Table {number}", objective, runs)),
        )
    yield Table(title="Figure 15: U by model, 60 hours", rows=tuple(_figure15(runs)))
    yield Table(title="Figure 16: U by rescaling cost", rows=tuple(_figure16(runs)))


def _trials(scaling: dict[str, Any], jobs: dict[str, Any]) -> tuple[SimulatedTrial, ...]:
    """Of an experiment, which has a model or some in turn; rates between widths are linear."""
    names, widths = jobs.get("cycle") or [jobs["dnn"]], range(1, jobs["Jmax"] + 1)
    rates = {
        name: tuple(np.interp(widths, its["nodes"], its["images_per_s"]).tolist())
        for name, its in scaling.items()
    }
    up, down = (
        its if isinstance(its, list) else [its] * jobs["n_jobs"]
        for its in (jobs["Tcup_s"], jobs["Tcdw_s"])
    )
    return tuple(
        SimulatedTrial(
            name=names[k % len(names)],
            rates=rates[names[k % len(names)]],
            epochs=1,
            samples_per_epoch=jobs["Pmax_images"],
            submit_s=k * jobs["spacing_s"],
            min_devices=jobs["Jmin"],
            rescale_up_s=up[k],
            rescale_down_s=down[k],
        )
        for k in range(jobs["n_jobs"])
    )


# -- decisions ------------------------------------------------------------------------------------


def _figure5(num_instances: int) -> Row:
    trials = bftrainer_trials(tuple(BFTRAINER_RATES), 35)
    allocator = ElasticAllocator(objective="throughput", forward_looking_s=120.0)
    times_s = []
    for seed in range(num_instances):
        problem = random_problem(trials, 800, seed)
        began = time.perf_counter()
        allocator.allocate(problem)
        times_s.append(time.perf_counter() - began)
    return Row(
        place="Fig. 5, 3.6",
        what="35 trials x 800 nodes, median",
        paper=at_most(1000.0),
        ours=1e3 * statistics.median(times_s),
        unit="ms",
        why="wall time on this machine",
    )


# -- the trace ------------------------------------------------------------------------------------


def _until(trace: NodeTrace, end_s: float) -> NodeTrace:
    """Its beginning."""
    return replace(trace, changes=tuple(c for c in trace.changes if c.time_s <= end_s))


def _trace_rows(trace: NodeTrace) -> Iterator[Row]:
    found = trace_statistics(trace)
    idle = found["mean_idle"] / found["nodes"]
    events = len(trace.changes) / found["hours"]
    for place, what, paper, ours, unit, why in (
        ("2.1", "idle nodes, of 4,608", 407.0, SUMMIT_NODES * idle, "", _ALL_NODES),
        ("Table 1", "idle nodes, of all", 11.1, 100 * idle, "%", _MONTHS),
        ("2.1", "events an hour", 68.0, events, "", _ALL_NODES),
        ("Table 1", "increases an hour", 41.7, found["joins_per_h"], "", _ALL_NODES),
        ("Table 1", "decreases an hour", 28.6, found["leaves_per_h"], "", _ALL_NODES),
        ("Fig. 1", "fragments below 10 min", 58.0, 100 * found["under_10_min"], "%", _ALL_NODES),
        ("Fig. 1", "their node time", 10.0, 100 * found["time_under_10_min"], "%", _ALL_NODES),
    ):
        yield _row(place, what, paper, ours, unit, why)
    yield Row(
        place="Table 1",
        what="Theta and Mira: idle nodes, of all",
        paper="12.5 %; 10.3 %",
        why="their logs weren't published with the paper",
    )
    leaves = np.array([change.time_s for change in trace.changes if change.left])
    following = np.searchsorted(leaves, trace.time_s, side="right")
    waits = leaves[following[following < len(leaves)]] - trace.time_s[following < len(leaves)]
    yield Row(
        place="Fig. 7a",
        what="events after which a node is taken within 170 s",
        paper=90.0,
        ours=100 * float((waits <= 170).mean()),
        unit="%",
        why=f"{_ALL_NODES}: a candidate, as the paper doesn't say of which nodes this is",
    )


# -- replays --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Of one replay.

    Attributes:
        report: See `trace_report`.
        percent: U, until the trace first ends.
        windows: U of every six hours until then in which a node was idle.
        invested: Samples that were trained, over what an event costs.
        node_hours: Of nodes that were idle, until the last trial ended.
        hours: By model, of the trials that ended.
        mean_hours: Of all of them.
    """

    report: dict[str, Any]
    percent: float
    windows: tuple[float, ...]
    invested: float
    node_hours: float
    hours: dict[str, float]
    mean_hours: float

    def cost(self, what: str = "rescale") -> float:
        """Of rescaling, or of preemption: samples per event; NaN if there was none."""
        return float(self.report[f"{what}_samples_per_event"]) or math.nan


Runs = dict[str, Replayed]


def _replay_all(data: Data) -> Runs:
    """Everything that a row needs, side by side on all cores."""
    policy = partial(Elastic, objective="throughput")
    scenario = partial(TraceScenario, trace=data.trace, events="nodes-only", policy=policy())
    equal, diverse = partial(scenario, trials=data.equal), partial(scenario, trials=data.diverse)
    rates = {trial.name: trial.rates for trial in data.diverse}
    wanted = {
        "heuristic": equal(
            policy=Own(
                allocator=EqualSplitAllocator(published=True),
                paradigm="elastic",
                moves_within_epochs=True,
            )
        ),
        "scaling-efficiency, patient": diverse(
            policy=Elastic(objective="scaling-efficiency", forward_looking_s=600.0)
        ),
    }
    wanted |= {
        f"{t_fwd_s} s": equal(policy=policy(forward_looking_s=float(t_fwd_s)))
        for t_fwd_s in _T_FWD_S
    }
    if not data.quick:
        wanted["to the end"] = equal(to_the_end=True)
    for objective in HOURS:
        for p in _SHOWN_AT_ONCE:
            wanted[f"{objective}, {p}"] = diverse(
                policy=Elastic(objective=objective), max_trials=p, to_the_end=not data.quick
            )
    for name, own in IN_DATA.items():
        trials = tuple(replace(trial, name=name, rates=rates[own]) for trial in data.equal)
        wanted[name] = scenario(trials=trials, trace=_until(data.trace, _FIG15_S))
    wanted |= {f"{times} x": equal(trials=_slower(data.equal, times)) for times in _COSTS}
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        return dict(zip(wanted, pool.map(_replayed, wanted.values()), strict=True))


def _slower(trials: Sequence[SimulatedTrial], times: int) -> tuple[SimulatedTrial, ...]:
    """The same, where a move costs so many times as much."""
    return tuple(
        replace(
            trial,
            rescale_up_s=times * trial.rescale_up_s,
            rescale_down_s=times * trial.rescale_down_s,
        )
        for trial in trials
    )


def _replayed(scenario: TraceScenario) -> Replayed:
    outcome = scenario.run()
    report = trace_report(scenario, outcome)
    hours = defaultdict(list)
    for progress in outcome.trials.values():
        if progress.ended_s is not None and progress.begun_s is not None:
            hours[progress.trial.name].append((progress.ended_s - progress.begun_s) / _HOUR_S)
    end_s = scenario.trace.end_s
    windows = [k * _WINDOW_S for k in range(max(1, round(end_s / _WINDOW_S)))]
    in_windows = [_u(scenario, outcome, t, min(t + _WINDOW_S, end_s)) for t in windows]
    trained = sum(progress.samples for progress in outcome.trials.values())
    present_h = sum(outcome.present_s.values()) / _HOUR_S
    return Replayed(
        report=report,
        percent=_u(scenario, outcome, 0.0, end_s),
        windows=tuple(u for u in in_windows if not math.isnan(u)),
        invested=trained / (report["rescale_samples_per_event"] or math.nan),
        node_hours=present_h if scenario.to_the_end else math.nan,
        hours={name: statistics.fmean(its) for name, its in hours.items()},
        mean_hours=_mean([h for its in hours.values() for h in its]),
    )


def _mean(numbers: Sequence[float]) -> float:
    return statistics.fmean(numbers) if numbers else math.nan


def _u(scenario: TraceScenario, outcome: Outcome, begin_s: float, end_s: float) -> float:
    """U in per cent between two moments; what a run trained is spread evenly over it.

    NaN if no node was idle.
    """
    samples: dict[int, float] = defaultdict(float)
    for span in outcome.spans:
        within_s = min(span.end_s, end_s) - max(span.start_s, begin_s)
        if within_s > 0:
            samples[span.number] += span.samples * within_s / (span.end_s - span.start_s)
    trials = [Progress(trial=outcome.trials[k].trial, samples=n) for k, n in samples.items()]
    idle_s = scenario.trace.mean_nodes(end_s) * end_s
    if begin_s:
        idle_s -= scenario.trace.mean_nodes(begin_s) * begin_s
    if not idle_s:
        return math.nan
    seconds = end_s - begin_s
    return 100 * utilisation(trials, idle_s / seconds, scenario.max_trials, seconds)


# -- equal trials ---------------------------------------------------------------------------------


def _equal(data: Data, runs: Runs) -> Iterator[Row]:
    """1,000 ShuffleNets, 10 at once."""
    split = runs["heuristic"]
    short, middle, usual, long = (runs[f"{t_fwd_s} s"] for t_fwd_s in _T_FWD_S)
    cheaper = split.cost() / short.cost()
    costs = "rescaling cost, T_fwd = 600 s / 10 s: rises"
    invested = "return on investment, T_fwd = 600 s / 10 s: falls"
    preempted = "preemption cost, MILP / heuristic: little difference"
    others = ", ".join(f"{run.percent:.1f}" for run in (short, middle, long))
    yield _row(
        "Fig. 7b", "rescaling cost of the heuristic, samples per event", 1.03e6, split.cost()
    )
    yield replace(
        _row("Fig. 7b", "... / that of MILP with T_fwd = 10 s", 76.0, cheaper, "x"), tolerance=0.15
    )
    yield _row("Fig. 7b", costs, at_least(1.0), long.cost() / short.cost(), "x")
    yield _row("Fig. 8", invested, at_most(1.0), long.invested / short.invested, "x")
    yield _row("Fig. 9", "U of the heuristic", 75.0, split.percent, "%")
    what = f"U, T_fwd = 120 s (10, 30, 600 s: {others} %)"
    yield _row("Fig. 9, 10", what, 80.0, usual.percent, "%")
    what = "U, T_fwd = 600 s / 120 s: saturated"
    yield _row("Fig. 9", what, SIMILAR, long.percent / usual.percent, "x")
    what = "U, T_fwd = 120 s / 10 s: rises"
    yield _row("Fig. 9", what, at_least(1.0), usual.percent / short.percent, "x")
    if not data.quick:
        hours = runs["to the end"].report["makespan_s"] / _HOUR_S
        yield _row("5.1", "hours until 1,000 trials have ended", 200.0, hours, "h", _AGAIN)
    yield from _figure10(usual.windows, split.windows)
    ratio = usual.cost("preempt") / split.cost("preempt")
    yield _row("Fig. 11a", preempted, (0.8, 1.25), ratio, "x")
    what = "rescaling cost, MILP / heuristic: much less"
    yield _row("Fig. 11b", what, at_most(0.5), usual.cost() / split.cost(), "x")


def _row(
    place: str, what: str, paper: float | Span, ours: float, unit: str = "", why: str = _NODES
) -> Row:
    return Row(place=place, what=what, paper=paper, ours=ours, unit=unit, why=why)


def _figure10(milp: Sequence[float], heuristic: Sequence[float]) -> Iterator[Row]:
    """Of windows of six hours, T_fwd = 120 s."""
    gains = [ours / theirs for ours, theirs in zip(milp, heuristic, strict=True) if theirs]
    static = (
        "each window has its own static machine here, of as many nodes as were idle in it. A "
        "candidate: the paper's mean is that of the whole week, as in Fig. 9"
    )
    level = (
        f"of {len(gains)} windows, {sum(gain < 1 for gain in gains)} in which the heuristic is "
        "level or ahead: the optimum is that of a decision, not of what comes later"
    )
    best = f"U of the best of {len(milp)} windows of six hours"
    yield _row("Fig. 10", best, 90.0, max(milp), "%")
    yield _row("Fig. 10", "mean U of these windows", 80.0, statistics.fmean(milp), "%", static)
    yield _row("Fig. 10", "MILP / heuristic, best window", 1.32, max(gains, default=math.nan), "x")
    worst = "MILP / heuristic, worst window: better"
    yield _row("Fig. 10", worst, at_least(1.0), min(gains, default=math.nan), "x", level)


# -- diverse trials -------------------------------------------------------------------------------


def _diverse(runs: Runs) -> Iterator[Row]:
    """Seven models in turn, T_fwd = 120 s."""
    few, usual, many = (runs[f"scaling-efficiency, {p}"] for p in _SHOWN_AT_ONCE)
    yield from _figure12(runs)
    gain = usual.percent / runs["throughput, 10"].percent
    what = "U, scaling efficiency / throughput, T_fwd = 120 s"
    yield _row("Fig. 13", what, at_least(1.0), gain, "x")
    gain = runs["scaling-efficiency, patient"].percent / usual.percent
    what = "U, scaling efficiency, T_fwd = 600 s / 120 s: as with equal trials"
    yield _row("Fig. 13", what, SIMILAR, gain, "x")
    what = "U, scaling efficiency, P_jmax = 35"
    yield _row("abstract", what, 93.0, many.percent, "%", _STATIC)
    what = "U, P_jmax = 35 / 5: rises"
    yield _row("Fig. 14c", what, at_least(1.0), many.percent / few.percent, "x")
    for run, p, paper in ((few, 5, 12.4), (usual, 10, 2.1)):
        what = f"node time without a trial, P_jmax = {p}"
        why = f"{_NODES}; and trials that have ended hold nodes until the next event"
        row = _row("5.3", what, paper, 100 * run.report["idle_share"], "%", why)
        yield replace(row, tolerance=0.25)
    which = "scaling efficiency, P_jmax = 35 / 5"
    ratio = many.mean_hours / few.mean_hours
    yield _row("Fig. 14b", f"mean runtime, {which}", 5.42, ratio, "x", _RUNTIMES)
    what, ratio = f"node hours until all have ended, {which}", many.node_hours / few.node_hours
    yield _row("Fig. 14a", what, 0.72, ratio, "x", _RUNTIMES)


def _figure12(runs: Runs) -> Iterator[Row]:
    """How unlike the models' runtimes are, 10 at once; the paper's are those of Tables 3, 4."""
    for objective, words in (("throughput", "unlike"), ("scaling-efficiency", "similar")):
        published = [hours[AT_ONCE.index(10)] for hours in HOURS[objective].values()]
        ours = runs[f"{objective}, 10"].hours.values()
        what = f"slowest / fastest model, objective {objective}: {words}"
        paper, ratio = max(published) / min(published), max(ours) / min(ours) if ours else math.nan
        yield replace(_row("Fig. 12", what, paper, ratio, "x", _RUNTIMES), tolerance=0.25)


def _hours(place: str, objective: str, runs: Runs) -> Iterator[Row]:
    for name, published in HOURS[objective].items():
        for p in _SHOWN_AT_ONCE:
            paper = published[AT_ONCE.index(p)]
            ours = runs[f"{objective}, {p}"].hours.get(IN_DATA[name], math.nan)
            row = _row(place, f"{name}, P_jmax = {p}", paper, ours, "h", _RUNTIMES)
            yield replace(row, tolerance=0.25)


# -- scalability and rescaling cost ---------------------------------------------------------------


def _figure15(runs: Runs) -> Iterator[Row]:
    published: dict[str, float | Span] = {name: at_least(75.0) for name in IN_DATA}
    for name, paper in {**published, "AlexNet": 75.0, "DenseNet": 83.0}.items():
        yield _row("Fig. 15", f"U, {name}", paper, runs[name].percent, "%")


def _figure16(runs: Runs) -> Iterator[Row]:
    why = "lost nodes cost more as well: what a preempted trial loses grows alike"
    for times in _COSTS:
        what = f"U, {times} x the rescaling cost / 1 x: falls slightly"
        ratio = runs[f"{times} x"].percent / runs["120 s"].percent
        yield _row("Fig. 16", what, (0.8, 1.0), ratio, "x", why)
