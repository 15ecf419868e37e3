"""The count problem by mixed-integer programming (python-mip with CBC).

Binaries x[j, k, n]: trial j gets n devices of kind k. At most one of a trial is 1 (else it waits),
and the devices of a kind suffice. This is BFTrainer's model (Eq. 16) without its binaries per
node; see :mod:`optuna_fleet.alloc.counts`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from optuna_fleet.alloc.counts import CountProblem, Counts, objective_of
from optuna_fleet.alloc.problem import AllocationFailed

_LARGEST_GAIN = 1e5  # CBC takes objectives that differ by 1e-4 for equal
_RELATIVE_GAP = 1e-12

Key = tuple[int, int, int]
"""(trial, kind, devices)."""


def solve_by_mip(problem: CountProblem, time_limit_s: float) -> Counts:
    """Solves ``problem``, with any number of kinds.

    CBC has been seen to abort the process on valid models of other shapes, see
    :mod:`optuna_fleet.alloc.isolation`.

    Returns:
        The optimum, or what was found within the time, with its gap.

    Raises:
        AllocationFailed: Nothing was found within the time, or the solver failed.
    """
    gains = dict(_gains(problem))
    if not gains:  # CBC refuses a model without variables
        waiting = ((0, 0),) * len(problem.values)
        objective = objective_of(problem, waiting)
        return Counts(widths=waiting, objective=objective, status="optimal", gap=0.0)
    return _run_solver(problem, gains, time_limit_s)


def _gains(problem: CountProblem) -> Iterator[tuple[Key, float]]:
    """Gains over waiting of the widths that fit and gain more than all narrower ones."""
    for j, values in enumerate(problem.values):
        for k, capacity in enumerate(problem.capacities):
            row = values[k, : capacity + 1] - values[k, 0]
            for n in 1 + np.flatnonzero(row[1:] > np.maximum.accumulate(row)[:-1]):
                yield (j, k, int(n)), float(row[n])


def _run_solver(problem: CountProblem, gains: dict[Key, float], time_limit_s: float) -> Counts:
    # Imported late: importing the package must not load CBC.
    import mip

    solved = (mip.OptimizationStatus.OPTIMAL, mip.OptimizationStatus.FEASIBLE)
    try:
        model, x = _model(problem, gains)
        status = model.optimize(max_seconds=time_limit_s)
        chosen = [key for key, var in x.items() if status in solved and var.x > 0.5]
        gap = float(model.gap) if status in solved else math.inf
    except Exception as error:
        raise AllocationFailed(f"CBC failed: {type(error).__name__}: {error}") from error
    if status not in solved:
        raise AllocationFailed(f"CBC ended with {status.name} after at most {time_limit_s:g} s.")
    by_trial = {j: (k, n) for j, k, n in chosen}
    widths = tuple(by_trial.get(j, (0, 0)) for j in range(len(problem.values)))
    return Counts(
        widths=widths,
        objective=objective_of(problem, widths),
        status="optimal" if status == mip.OptimizationStatus.OPTIMAL else "feasible",
        gap=gap if math.isfinite(gap) else None,
    )


def _model(problem: CountProblem, gains: dict[Key, float]) -> tuple[Any, dict[Key, Any]]:
    import mip

    model = mip.Model(sense=mip.MAXIMIZE, solver_name=mip.CBC)
    model.verbose = 0
    model.threads = 1
    model.preprocess = 0  # CBC of python-mip 2.0 aborts in its preprocessing on valid models
    model.max_mip_gap = _RELATIVE_GAP
    # Cuts stay on, unlike in `mip`: of 50 problems with 35 similar trials all then took less than
    # 4 s; without, 4 of them took more than 20 s.
    x = {key: model.add_var(var_type=mip.BINARY) for key in gains}
    scale = _LARGEST_GAIN / max(gains.values())
    model.objective = scale * mip.xsum(gain * x[key] for key, gain in gains.items())
    of_trial: dict[int, list[Any]] = defaultdict(list)
    of_kind: dict[int, list[Any]] = defaultdict(list)
    for (j, k, n), var in x.items():
        of_trial[j].append(var)
        of_kind[k].append(n * var)
    for terms in of_trial.values():
        model += mip.xsum(terms) <= 1
    for k, terms in of_kind.items():
        model += mip.xsum(terms) <= problem.capacities[k]
    return model, x
