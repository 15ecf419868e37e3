"""Utilisation of nodes that come and go, on BFTrainer's recorded trace and on a large made-up one.

python benchmarks/trace.py --data FOLDER               # both tables, about 5 minutes
OPTUNA_FLEET_DATA=FOLDER python benchmarks/trace.py --only utilisation --rounds 3

FOLDER holds `summit_idle_week1.npz` (idle nodes among 1,024 of Summit in a week) and
`bftrainer_jobs.json` (throughputs and workloads), both made from what was published with
BFTrainer; see `optuna_fleet/replay/{trace,jobs}.py` for the fields. Results are deterministic,
times are not: of several rounds the best counts.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from optuna_fleet.policies import Elastic
from optuna_fleet.replay.jobs import load_jobs
from optuna_fleet.replay.scenarios import TraceScenario, trace_report
from optuna_fleet.replay.trace import NodeTrace, load_trace
from optuna_fleet.replay.workload import SimulatedTrial

_DATA = "OPTUNA_FLEET_DATA"

Objective = Literal["throughput", "scaling-efficiency"]

# The made-up trace: as many nodes, moments, changes and idle nodes as two weeks of all of Summit.
_BLOCKS, _NODES_PER_BLOCK, _MOMENTS, _GAP_S = 470, 10, 23_000, 53.0
_IDLE_MOMENTS, _BUSY_MOMENTS = 18.5, 196.5
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
    """A made-up trace of a million changes."""
    trace = random_trace(seed=0)
    trials = _long_queue(load_jobs(data / "bftrainer_jobs.json", "hpo"))
    policy = Elastic(objective="throughput")
    run = TraceScenario(trace=trace, trials=trials, max_trials=35, policy=policy)
    done = replay(run, num_rounds)
    _print_head("made-up trace", "trials at once", "U", "decisions", "solver", "wall")
    size = f"{len(trace.names)} nodes, {len(trace.time_s)} moments, {len(trace.node)} changes"
    print(f"| {size} | 35 | {100 * done.report['utilisation']:.1f} % | {done.cost} |", flush=True)


def _print_head(*titles: str) -> None:
    print(f"\n| {' | '.join(titles)} |\n{'|---' * len(titles)}|", flush=True)


# -- the made-up trace ------------------------------------------------------------------------


def random_trace(seed: int) -> NodeTrace:
    """Blocks of neighbours that fall idle and are taken together, at random.

    How long a block is idle or taken is geometric, in moments of the trace.
    """
    generator = np.random.default_rng(seed)
    idle, busy = (_durations(generator, mean) for mean in (_IDLE_MOMENTS, _BUSY_MOMENTS))
    starts_idle = generator.random(_BLOCKS) < _IDLE_MOMENTS / (_IDLE_MOMENTS + _BUSY_MOMENTS)
    # Column k: how long its k-th state lasts; idle and busy take turns.
    is_idle = starts_idle[:, None] ^ (np.arange(idle.shape[1]) % 2 == 1)
    moment = np.where(is_idle, idle, busy).cumsum(axis=1)
    block, turn = np.nonzero(moment < _MOMENTS)
    delta = np.where(is_idle[block, turn], -1, 1)
    order = np.argsort(moment[block, turn], kind="stable")
    block, event, delta = block[order], moment[block, turn][order], delta[order]
    first = block * _NODES_PER_BLOCK
    nodes = first[:, None] + np.arange(_NODES_PER_BLOCK)
    return NodeTrace(
        time_s=np.append(0.0, generator.exponential(_GAP_S, _MOMENTS - 1).cumsum()),
        initial_idle=np.repeat(starts_idle, _NODES_PER_BLOCK),
        event=np.repeat(event, _NODES_PER_BLOCK),
        node=nodes.ravel(),
        delta=np.repeat(delta, _NODES_PER_BLOCK),
        names=tuple(f"n{i:05d}" for i in range(_BLOCKS * _NODES_PER_BLOCK)),
    )


def _durations(generator: np.random.Generator, mean: float) -> NDArray[np.int64]:
    enough = 4 * round(_MOMENTS / (_IDLE_MOMENTS + _BUSY_MOMENTS))
    return generator.geometric(1 / mean, (_BLOCKS, enough))


def _long_queue(trials: Sequence[SimulatedTrial]) -> list[SimulatedTrial]:
    """More trials than the trace can finish, there from the start."""
    return [replace(trial, submit_s=0.0) for trial in trials] * _QUEUE_REPEATS


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
