"""The count problem by mixed-integer programming (python-mip with CBC).

Binaries x[j, k, n]: trial j gets n devices of kind k. At most one of a trial is 1 (else it waits),
and the devices of a kind suffice. This is BFTrainer's model (Eq. 16) without its binaries per
node; see :mod:`optuna_fleet.alloc.counts`.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Any

from optuna_fleet.alloc.cbc import choose, new_model
from optuna_fleet.alloc.counts import CountProblem, Counts, useful_options

_LARGEST_GAIN = 1e5  # CBC takes objectives that differ by 1e-4 for equal
_RELATIVE_GAP = 1e-12

Key = tuple[int, int, int]
"""(trial, kind, devices)."""


def solve_by_mip(problem: CountProblem, time_limit_s: float) -> Counts:
    """Solves ``problem``, with any number of kinds.

    Returns:
        The optimum, or what was found within the time, with its gap.

    Raises:
        AllocationFailed: Nothing was found within the time, or the solver failed.
    """
    gains = {
        (j, kind, n): gain
        for j, values in enumerate(problem.values)
        for kind, n, gain in zip(*useful_options(values - values[0, 0]), strict=True)
        if n <= problem.capacities[kind]
    }
    if not gains:  # CBC refuses a model without variables
        return Counts(widths=((0, 0),) * len(problem.values), status="optimal", gap=0.0)
    chosen, status, gap = choose(partial(_model, problem, gains), time_limit_s)
    by_trial = {j: (k, n) for j, k, n in chosen}
    widths = tuple(by_trial.get(j, (0, 0)) for j in range(len(problem.values)))
    return Counts(widths=widths, status=status, gap=gap)


def _model(problem: CountProblem, gains: dict[Key, float]) -> tuple[Any, dict[Key, Any]]:
    import mip

    model = new_model()
    model.max_mip_gap = _RELATIVE_GAP
    # CBC looks for cuts whatever the time limit: with 400 trials on 500 devices of 3 kinds for
    # 8 s, and then has nothing; without, it has the optimum in 0.1 s.
    model.cuts = 0
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
