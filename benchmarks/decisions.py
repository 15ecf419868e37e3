"""How long decisions take: the count problem solved in both ways, and whole elastic allocations.

python benchmarks/decisions.py --data FOLDER           # or set OPTUNA_FLEET_DATA; about a minute

FOLDER holds `bftrainer_jobs.json`, see `benchmarks/trace.py`: the trials of the first two sizes
are its diverse workload, on random devices at the moment of the decision. The problems of the
last size are taken from a simulated sweep while all of its trials are unfinished. An instance
counts with the best of several times; the table has the smallest, median and largest instance.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
from ensembles import NUM_TRIALS, ensemble
from problems import random_problem

from optuna_fleet.alloc.counts import CountProblem, solve_exactly
from optuna_fleet.alloc.counts_mip import solve_by_mip
from optuna_fleet.alloc.elastic import ElasticAllocator, count_problem
from optuna_fleet.alloc.problem import AllocationProblem, Plan
from optuna_fleet.replay.jobs import load_jobs
from optuna_fleet.replay.scenarios import EnsembleScenario

_DATA = "OPTUNA_FLEET_DATA"
_FORWARD_LOOKING_S = 120.0
_MIP_LIMIT_S = 60.0
_REPEATS = 3

Problem = TypeVar("Problem", AllocationProblem, CountProblem)


# -- problems ---------------------------------------------------------------------------------


@dataclass(slots=True)
class Recorder:
    """The elastic allocator, with a memory."""

    problems: list[AllocationProblem] = field(default_factory=list)
    name: str = "recorder"

    def allocate(self, problem: AllocationProblem) -> Plan:
        """Decide and remember the problem."""
        self.problems.append(problem)
        return ElasticAllocator().allocate(problem)


def sweep_problems(num_devices: int, num_instances: int) -> list[AllocationProblem]:
    """Problems of one sweep, evenly spread over the time before the first trial ends."""
    recorder = Recorder()
    trials = ensemble("A", 100, num_devices)
    EnsembleScenario(trials=trials, num_devices=num_devices, allocator=recorder).run()
    whole = [p for p in recorder.problems if len(p.candidates) == NUM_TRIALS]
    picked = np.linspace(0, len(whole) - 1, num_instances).astype(int)
    return [whole[k] for k in picked]


def counts_of(problem: AllocationProblem) -> CountProblem:
    """The count problem for throughput."""
    return count_problem(problem, "throughput", _FORWARD_LOOKING_S)[1]


# -- table ------------------------------------------------------------------------------------


def print_row(
    what: str,
    decide: Callable[[Problem], object],
    problems: Sequence[Problem],
    repeats: int = _REPEATS,
) -> None:
    times_ms = [_best_ms(decide, problem, repeats) for problem in problems]
    low, middle, high = min(times_ms), statistics.median(times_ms), max(times_ms)
    print(f"| {what} | {len(times_ms)} | {low:.3g} | {middle:.3g} | {high:.3g} |", flush=True)


def _best_ms(decide: Callable[[Problem], object], problem: Problem, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        decide(problem)
        times.append(time.perf_counter() - began)
    return 1e3 * min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = os.environ.get(_DATA)
    parser.add_argument(
        "--data", type=Path, default=default, required=default is None, help=f"or ${_DATA}"
    )
    parser.add_argument("--instances", type=int, default=11)
    options = parser.parse_args()
    jobs = load_jobs(options.data / "bftrainer_jobs.json", "diverse")
    seeds = range(options.instances)
    some = [random_problem(jobs[:35], 800, seed) for seed in seeds]
    many = [random_problem(jobs[:1000], 10_000, seed) for seed in seeds]
    throughput, makespan = ElasticAllocator(objective="throughput"), ElasticAllocator()
    print("| decision | instances | min, ms | median, ms | max, ms |\n|---|---|---|---|---|")
    print_row(
        "count problem, 35 trials x 800 nodes, MIP",
        lambda counts: solve_by_mip(counts, _MIP_LIMIT_S),
        [counts_of(problem) for problem in some],
        repeats=1,
    )
    print_row("the same, exact", solve_exactly, [counts_of(problem) for problem in some])
    print_row("the same, whole `allocate`", throughput.allocate, some)
    print_row(
        "count problem, 1,000 trials x 10,000 devices, exact",
        solve_exactly,
        [counts_of(problem) for problem in many],
    )
    print_row("the same, whole `allocate`", throughput.allocate, many)
    print_row(
        "makespan, 100 trials x 160 devices, whole `allocate`",
        makespan.allocate,
        sweep_problems(160, options.instances),
    )


if __name__ == "__main__":
    main()
