"""The allocation as a mixed-integer program: how many devices of which type each trial gets.

It serves every policy that solves; they differ by what devices are worth to a trial, and by when
they ask. With x[t,k,m] = 1 if trial t gets m devices of type k::

    maximise    sum v[t,k,m] x[t,k,m] - c sum y[s]
    subject to  sum_{k,m} x[t,k,m] <= 1                                for each trial t
                sum_{t,m} m x[t,k,m] + sum_t z[t,k] <= D_k             for each device type k
                sum_k z[t,k] = sum_m m x[t,several types,m]            for each t that spans types
                z[t,k] <= sum_m (m - 1) x[t,several types,m]           for each such t, and k
                sum_{k,m in A} x[t,k,m] <= sum y[s] over s that admit A
                sum_s rho_s y[s] <= P

D_k are the devices of type k, less those of trials that can't move now. This is Eq. 16 of
BFTrainer, with counts in place of its binaries per node: devices of one type are interchangeable,
so who shrinks keeps some of its own, who grows all of them, and the rest suffices. The last two
lines are about flotillas: y[s] = 1 if one is open whose slowest rate is rho_s, of all rates that
occur. They are there where a flotilla costs something, or preprocessing is limited.
"""

from __future__ import annotations

import importlib.util
import logging
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from optuna_fleet.alloc.draft import Decision, kind_of_share, share_of
from optuna_fleet.alloc.problem import SEVERAL, AllocationFailed, AllocationProblem
from optuna_fleet.alloc.program import TIE, Key, Program, Worth, by_slope
from optuna_fleet.alloc.streams import phases_of

_logger = logging.getLogger(__name__)

MOST_FLOTILLAS = 40
"""Rates that are tried as those of flotillas at most, over all phases."""

_LARGEST = 1e5  # what the objective is scaled to: CBC takes what differs by 1e-4 for equal
_RELATIVE_GAP = 1e-4


def decide(problem: AllocationProblem, worth: Worth, *, flotilla_cost: float = 0.0) -> Decision:
    """The choice that is worth most, or what was found of it within the time limit.

    Where the solver has nothing in time, or fails, the choice is that of :func:`by_slope`.
    """
    program = Program.of(problem, worth, flotilla_cost)
    start, prices = by_slope(program)
    if not program.options:
        return Decision(choice=start, status="trivial", gap=0.0)
    try:
        decision = _solve(program.without_hopeless(program.value(start), prices))
    except AllocationFailed as error:
        return Decision(choice=start, status=f"fallback: {error}")
    is_better = program.value(decision.choice) >= program.value(start)
    return decision if is_better else replace(decision, choice=start)


@lru_cache(maxsize=1)
def _has_highs() -> bool:
    return any(importlib.util.find_spec(name) for name in ("highspy", "highsbox"))


def _solve(program: Program) -> Decision:
    """The best choice of a program.

    Raises:
        AllocationFailed: Nothing was found within the time, or the solver failed.
    """
    try:
        # Imported late: the driver names what uses it, but only the solver process loads it.
        import mip

        model = _new_model(program)
        x, z = _build(model, program)
        status = model.optimize(max_seconds=program.problem.time_limit_s)
        if status not in (mip.OptimizationStatus.OPTIMAL, mip.OptimizationStatus.FEASIBLE):
            cause = f"{status.name} after {program.problem.time_limit_s:g} s at most"
            raise AllocationFailed(f"the solver ended with {cause}")
        chosen = [key for key, var in x.items() if var.x > 0.5]
        taken = {key: round(var.x) for key, var in z.items()}
        gap = float(model.gap)
    except AllocationFailed:
        raise
    except Exception as error:
        raise AllocationFailed(f"the solver failed: {type(error).__name__}: {error}") from error
    choice = {**program.fixed}
    for number, kind, m in chosen:
        mixture = {k: taken[number, k] for k in program.room if taken.get((number, k))}
        choice[number] = mixture if kind == SEVERAL else {kind: m}
    name = type(model.solver).__name__.removeprefix("Solver").upper()
    _logger.debug("%s: %s, gap %g, %d options", name, status.name, gap, len(x))
    return Decision(
        choice=choice,
        status="optimal" if status == mip.OptimizationStatus.OPTIMAL else "feasible",
        gap=gap if math.isfinite(gap) else None,
        solver=name,
    )


def _new_model(program: Program) -> Any:
    """An empty one, to be maximised by HiGHS where that is installed, else by CBC."""
    import mip

    model = mip.Model(sense=mip.MAXIMIZE, solver_name=mip.HIGHS if _has_highs() else mip.CBC)
    model.verbose = 0
    model.threads = 1
    model.preprocess = 0  # CBC of python-mip 2.0 aborts in its preprocessing on valid models
    model.max_mip_gap = _RELATIVE_GAP
    # They save four fifths of the time where only devices of one type are short. Else CBC
    # looks for them whatever the time limit, and then has nothing.
    model.cuts = int(len(program.room) == 1 and not program.has_flotillas)
    return model


def _build(model: Any, program: Program) -> tuple[dict[Key, Any], dict[tuple[int, str], Any]]:
    """The equations of the module.

    Returns:
        x and z.
    """
    import mip

    scale = _LARGEST / max(o.gain for o in program.options)
    x = {o.key: model.add_var(var_type=mip.BINARY, obj=scale * o.gain) for o in program.options}
    of_trial: dict[int, list[Any]] = defaultdict(list)
    of_kind: dict[str, list[Any]] = defaultdict(list)
    mixed: dict[int, list[Any]] = defaultdict(list)
    for (number, kind, m), var in x.items():
        of_trial[number].append(var)
        (mixed[number] if kind == SEVERAL else of_kind[kind]).append(m * var)
    for terms in of_trial.values():
        model += mip.xsum(terms) <= 1
    z = {
        key: var
        for number, terms in mixed.items()
        for key, var in _add_mixture(model, program, number, terms, x).items()
    }
    for kind, room in program.room.items():
        taken = [var for (_, k), var in z.items() if k == kind]
        model += mip.xsum([*of_kind[kind], *taken]) <= room
    if program.has_flotillas:
        _add_flotillas(model, program, x, scale)
    return x, z


def _add_mixture(
    model: Any, program: Program, number: int, terms: list[Any], x: Mapping[Key, Any]
) -> dict[tuple[int, str], Any]:
    """Devices of each type, two types at least, of a trial that can have several."""
    import mip

    room = program.room
    z = {
        (number, kind): model.add_var(  # rather the fast ones
            ub=room[kind], obj=-rank * TIE * _LARGEST, var_type=mip.INTEGER
        )
        for rank, kind in enumerate(program.problem.types_of(number, SEVERAL))
    }
    flies = mip.xsum(var for key, var in x.items() if key[:2] == (number, SEVERAL))
    model += mip.xsum(z.values()) == mip.xsum(terms)
    for var in z.values():
        model += var <= mip.xsum(terms) - flies
    devices = program.problem.by_number[number].devices
    own, staying = share_of(program.problem, devices), (number, SEVERAL, len(devices))
    if len(own) > 1 and staying in x:
        for kind in sorted(own.keys() & room.keys()):
            model += z[number, kind] >= own[kind] * x[staying]
    return z


def _add_flotillas(model: Any, program: Program, x: Mapping[Key, Any], scale: float) -> None:
    """The last two lines: which flotillas are open, by the rate of their slowest trial.

    Where the preprocessors' capacity counts, by that of the fastest, which their streams draw.
    """
    import mip

    problem = program.problem
    is_limited, phases = math.isfinite(program.limit), phases_of(problem)
    fixed = {(t, kind_of_share(s), sum(s.values())) for t, s in program.fixed.items()}
    by_number = problem.by_number
    rates = {key: by_number[key[0]].rates_on(key[1])[key[2] - 1] for key in (*x, *fixed)}
    rho: dict[int, list[float]] = {}
    for phase in sorted(set(phases.values())):
        there = {rate for key, rate in rates.items() if phases[key[0]] == phase}
        must = {rates[key] for key in fixed if phases[key[0]] == phase}
        rho[phase] = _thinned(sorted(there), max(8, MOST_FLOTILLAS // len(set(phases.values()))))
        if math.isinf(problem.rate_spread) and not is_limited:
            del rho[phase][1:]
        rho[phase] = sorted({*rho[phase], *must})
    cost = -scale * program.flotilla_cost
    y = {
        (phase, rate): model.add_var(var_type=mip.BINARY, obj=cost)
        for phase, its in rho.items()
        for rate in its
    }
    if is_limited:
        # As shares of the limit: the solver's tolerance is absolute, ours relative.
        drawn = (rate / program.limit * var for (_, rate), var in y.items())
        model += mip.xsum(drawn) <= 1
    rows: dict[tuple[int, tuple[float, ...]], list[Key]] = defaultdict(list)
    for key, rate in rates.items():
        admitting = tuple(
            r for r in rho[phases[key[0]]] if _admits(r, rate, problem.rate_spread, is_limited)
        )
        rows[key[0], admitting].append(key)  # one row for all options of equal flotillas
    for (number, admitting), keys in rows.items():
        flies = mip.xsum(x[key] for key in keys) if number not in program.fixed else 1
        model += mip.xsum(y[phases[number], rate] for rate in admitting) >= flies


def _admits(rho: float, rate: float, rate_spread: float, is_fastest: bool) -> bool:
    """Whether a flotilla whose slowest (fastest) trial is of rate `rho` can have another one."""
    slow, fast = (rate, rho) if is_fastest else (rho, rate)
    return slow <= fast <= slow * rate_spread


def _thinned(rates: list[float], most: int) -> list[float]:
    """At most so many of them, the first and the last among them."""
    if len(rates) <= most:
        return rates
    picked = {round(k * (len(rates) - 1) / (most - 1)) for k in range(most)}
    return [rates[k] for k in sorted(picked)]
