"""How long the decisions of the elastic allocator take: worths, the model, and the devices chosen.

python -m benchmarks.decisions                # less than a minute

Trials of unlike speed and scaling, three in four of which fly as widths come about, a tenth of the
devices idle. Times are of whole decisions, p50 and p90 of all instances: of the worths, the model
and the choice of the devices. Options are how many devices of which type a trial could get, before
and after those are ruled out that are in no better choice; medians.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass

import numpy as np

from optuna_fleet.alloc import AllocationProblem, Candidate, ElasticAllocator
from optuna_fleet.alloc.program import Program, by_slope

SIZES = ((24, 16, 1), (24, 16, 2), (64, 64, 1), (64, 64, 2), (35, 800, 1))
"""Trials, devices, device types."""

_WIDEST = 160
_NODE = 4
_RESCALE_S = 20.0


@dataclass(frozen=True)
class Timed:
    """One decision.

    Attributes:
        whole_s: How long all of it took.
        options: Before and after ruling out.
        is_optimal: Whether the solver says so.
    """

    whole_s: float
    options: tuple[int, int]
    is_optimal: bool


def made_up(num_trials: int, num_devices: int, num_kinds: int, seed: int) -> AllocationProblem:
    draw = random.Random(seed)
    kinds = ["a", "b"][:num_kinds]
    nodes = [tuple(range(k, k + _NODE)) for k in range(0, num_devices, _NODE)]
    of_node = [kinds[k * num_kinds // len(nodes)] for k in range(len(nodes))]
    per_kind = num_devices // num_kinds
    free = {kind: list(range(k * per_kind, (k + 1) * per_kind)) for k, kind in enumerate(kinds)}
    widest = min(_WIDEST, per_kind)

    def trial(number: int) -> Candidate:
        one, power = draw.uniform(20, 180), draw.uniform(0.7, 0.95)
        speeds = {"a": one, "b": one * draw.uniform(0.3, 0.7)}
        curve = [m**power for m in range(1, widest + 1)]
        rates = {kind: tuple(speeds[kind] * c for c in curve) for kind in kinds}
        kind = draw.choice(kinds)
        wanted = min(widest, max(1, round(draw.uniform(0.2, 2) * num_devices / num_trials)))
        left = len(free[kind]) - per_kind // 10
        flies = draw.random() < 0.75 and wanted <= left
        return Candidate(
            number=number,
            rates=rates[kind],
            rates_by_kind=rates if num_kinds > 1 else {},
            devices=tuple(free[kind].pop() for _ in range(wanted * flies)),
            epochs_done=draw.randint(0, 12),
            samples_per_epoch=3e4,
            rescale_up_s=_RESCALE_S,
            rescale_down_s=_RESCALE_S,
        )

    return AllocationProblem(
        candidates=tuple(trial(n) for n in range(num_trials)),
        nodes=tuple(nodes),
        kinds=tuple(of_node) if num_kinds > 1 else (),
        rate_spread=float("inf"),
        finished_epochs=(10, 12, 14, 16, 20),
    )


def timed(allocator: ElasticAllocator, problem: AllocationProblem) -> Timed:
    began = time.perf_counter()
    plan = allocator.allocate(problem)
    whole_s = time.perf_counter() - began
    program = Program.of(problem, allocator.worth(problem), 0.0)
    start, prices = by_slope(program)
    kept = program.without_hopeless(program.value(start), prices)
    return Timed(
        whole_s=whole_s,
        options=(len(program.options), len(kept.options)),
        is_optimal=plan.status in ("optimal", "trivial"),
    )


def row_of(allocator: ElasticAllocator, size: tuple[int, int, int], num_instances: int) -> str:
    found = [timed(allocator, made_up(*size, seed)) for seed in range(num_instances)]
    whole = [1e3 * t.whole_s for t in found]
    before, after = np.median([t.options for t in found], axis=0).astype(int).tolist()
    cells = [
        f"{size[0]} x {size[1]}" + (", two types" if size[2] > 1 else ""),
        allocator.objective,
        *(f"{ms:.3g} ms" for ms in (np.percentile(whole, 50), np.percentile(whole, 90))),
        f"{before:,} -> {after:,}" if after < before else f"{before:,}",
        f"{sum(t.is_optimal for t in found)} of {len(found)}",
    ]
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instances", type=int, default=20)
    options = parser.parse_args()
    ElasticAllocator().allocate(made_up(*SIZES[0], 0))  # the first one loads the solver
    print("| trials x devices | objective | p50 | p90 | options | optimal |")
    print("|---|---|---|---|---|---|")
    for size in SIZES:
        for objective in ("makespan", "throughput"):
            allocator = ElasticAllocator(objective=objective)
            print(row_of(allocator, size, options.instances), flush=True)


if __name__ == "__main__":
    main()
