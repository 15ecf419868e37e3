"""Utilisation of nodes that come and go, on BFTrainer's recorded trace and on a large made-up one.

python benchmarks/trace.py --data FOLDER               # both tables, about 5 minutes
OPTUNA_FLEET_DATA=FOLDER python benchmarks/trace.py --only utilisation --rounds 3

FOLDER holds `summit_idle_week1.npz` (idle nodes among 1,024 of Summit in a week) and
`bftrainer_jobs.json` (throughputs and workloads), both made from what was published with
BFTrainer; see `optuna_fleet/replay/{trace,jobs}.py` for the fields. The made-up trace is that of
`optuna-fleet trace`, for all of Summit in two weeks. Decisions are made as trials end, too, which
the paper's simulator does not: `python -m benchmarks.papers bftrainer` has that. Results are
deterministic, times are not: of several rounds the best counts.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from optuna_fleet.policies import Elastic
from optuna_fleet.replay.jobs import load_jobs
from optuna_fleet.replay.scenarios import TraceScenario, trace_report
from optuna_fleet.replay.synthetic import SUMMIT_NODES, synthetic_trace
from optuna_fleet.replay.trace import load_trace

_DATA = "OPTUNA_FLEET_DATA"

Objective = Literal["throughput", "scaling-efficiency"]

_QUEUE_REPEATS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What one run came to.

    Attributes:
        report: See `trace_report`.
        wall_s: Seconds it took, the least of all rounds.
        solver_ms: Median and 99th percentile of a decision, the least of all rounds.
    """

    report: dict[str, Any]
    wall_s: float
    solver_ms: tuple[float, float]

    @property
    def cost(self) -> str:
        """Times and numbers, as the last cells of a table."""
        median, p99 = self.solver_ms
        decisions = self.report["decisions"]
        return f"{decisions} | {median:.2f} / {p99:.2f} ms | {self.wall_s:.1f} s"


def replay(run: TraceScenario, num_rounds: int) -> Replay:
    """Run and time."""
    walls, medians, p99s = [], [], []
    for _ in range(num_rounds):
        began = time.perf_counter()
        outcome = run.run()
        walls.append(time.perf_counter() - began)
        report = trace_report(run, outcome)
        medians.append(1e3 * report["solver_s"]["median"])
        p99s.append(1e3 * report["solver_s"]["p99"])
    return Replay(report=report, wall_s=min(walls), solver_ms=(min(medians), min(p99s)))


# -- tables -----------------------------------------------------------------------------------


def print_utilisation(data: Path, num_rounds: int) -> None:
    """U by workload and number of trials at once."""
    trace = load_trace(data / "summit_idle_week1.npz")
    _print_head("workload", "objective", "trials at once", "U", "decisions", "solver", "wall")
    workloads: tuple[tuple[str, Objective], ...] = (
        ("hpo", "throughput"),
        ("diverse", "scaling-efficiency"),
    )
    for mix, objective in workloads:
        trials = load_jobs(data / "bftrainer_jobs.json", mix)
        for most in (10, 20, 35):
            policy = Elastic(objective=objective)
            run = TraceScenario(trace=trace, trials=trials, max_trials=most, policy=policy)
            done = replay(run, num_rounds)
            share = f"{100 * done.report['utilisation']:.1f} %"
            print(f"| {mix} | {objective} | {most} | {share} | {done.cost} |", flush=True)


def print_large(data: Path, num_rounds: int) -> None:
    """All of Summit, made up, with more trials than it can finish."""
    trace = synthetic_trace(0, num_nodes=SUMMIT_NODES, hours=336)
    jobs = load_jobs(data / "bftrainer_jobs.json", "hpo")
    trials = [replace(trial, submit_s=0.0) for trial in jobs] * _QUEUE_REPEATS
    policy = Elastic(objective="throughput")
    run = TraceScenario(trace=trace, trials=trials, max_trials=35, policy=policy)
    done = replay(run, num_rounds)
    _print_head("made-up trace", "trials at once", "U", "decisions", "solver", "wall")
    size = f"{len(trace.names)} nodes, {len(trace.time_s)} moments, {len(trace.node)} changes"
    print(f"| {size} | 35 | {100 * done.report['utilisation']:.1f} % | {done.cost} |", flush=True)


def _print_head(*titles: str) -> None:
    print(f"\n| {' | '.join(titles)} |\n{'|---' * len(titles)}|", flush=True)


# -- command line -----------------------------------------------------------------------------

TABLES: dict[str, Callable[[Path, int], None]] = {
    "utilisation": print_utilisation,
    "large": print_large,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = os.environ.get(_DATA)
    parser.add_argument(
        "--data", type=Path, default=default, required=default is None, help=f"or ${_DATA}"
    )
    parser.add_argument("--only", choices=TABLES, action="append", help="may be repeated")
    parser.add_argument("--rounds", type=int, default=1, help="of which the best time counts")
    options = parser.parse_args()
    for name in options.only or TABLES:
        TABLES[name](options.data, options.rounds)


if __name__ == "__main__":
    main()
