"""Asks an allocator and notes how long it took: allocators themselves know no clock."""

from __future__ import annotations

import time
from dataclasses import replace

from optuna_fleet.alloc.problem import AllocationProblem, Allocator, Plan


def timed(allocator: Allocator, problem: AllocationProblem) -> Plan:
    """The allocator's plan, with `solve_time_s` set; raises what `allocate` raises."""
    started = time.perf_counter()
    plan = allocator.allocate(problem)
    elapsed_s = time.perf_counter() - started
    # What is no plan is for the caller to refuse: the allocator may be the user's.
    return replace(plan, solve_time_s=elapsed_s) if isinstance(plan, Plan) else plan
