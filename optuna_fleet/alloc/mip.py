"""The exact allocation, by mixed-integer programming (python-mip with CBC).

Binaries: x[i, m], trial i flies on m devices; y[rho], a flotilla is open whose rates are within
``[rho, rho * rate_spread]``. Each trial flies on one width at most, only under an open flotilla
that admits its rate there, and the widths sum to at most the devices. One model decides about all
flotillas: flotilla after flotilla, the first would break up those that fly already.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from optuna_fleet.alloc.assembly import Widths, assemble, fill_idle, group_widths
from optuna_fleet.alloc.greedy import GreedyAllocator
from optuna_fleet.alloc.problem import AllocationFailed, AllocationProblem, Candidate, Plan

_logger = logging.getLogger(__name__)

MAX_REFERENCE_RATES = 40
"""Rates that are tried as the slowest of a flotilla at most."""

_TIE = 1e-3
_OBJECTIVE_SCALE = 1000.0  # CBC takes objectives that differ by 1e-4 for equal
_RELATIVE_GAP = 1e-6

Option = tuple[int, int]
"""(trial number, devices)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MipAllocator:
    """Maximises useful work, counted in devices that scale perfectly: the sum of r(m) / r(1).

    Attributes:
        rescale_penalty: What stopping, moving or rescaling a flying trial must gain at least, in
            device equivalents.
        waiting_bonus: What each decision that passed over a trial adds to its value, in device
            equivalents: sooner or later it flies.
        flotilla_cost: What a further flotilla costs (another stream of preprocessing), in device
            equivalents.
        max_flotillas: Most flotillas the solver may open; None for any number. Trials that wait
            while devices idle are added all the same.
    """

    rescale_penalty: float = 0.25
    waiting_bonus: float = 0.01
    flotilla_cost: float = 0.25
    max_flotillas: int | None = None
    name: str = field(default="mip", init=False)

    def allocate(self, problem: AllocationProblem) -> Plan:
        """Solves ``problem``; see :class:`Allocator`.

        Raises:
            AllocationFailed: The solver found nothing within ``time_limit_s``, or failed.
        """
        started = time.perf_counter()
        values = self.values(problem)
        widths, status, gap = self._solve(problem, values)
        if status == "feasible":
            widths = self._better(problem, values, widths)
        widths = fill_idle(problem, widths)
        return assemble(
            problem,
            reversed(group_widths(problem, widths)),
            allocator=self.name,
            status=status,
            gap=gap,
            solve_time_s=time.perf_counter() - started,
        )

    def values(self, problem: AllocationProblem) -> dict[Option, float]:
        """What each admissible (trial, width) is worth, in device equivalents."""
        values: dict[Option, float] = {}
        for rank, candidate in enumerate(problem.by_number.values()):
            extra = self.waiting_bonus * candidate.waited_rounds
            # Among equals rather more trials than wider ones, and the elder ones.
            extra += _TIE * (1 - rank / len(problem.candidates))
            kept = problem.kept_width(candidate)
            for m in _widths(candidate, kept, problem.num_devices):
                work = candidate.rate(m) / candidate.rate(1)
                keeping = self.rescale_penalty if m == kept else 0.0
                values[candidate.number, m] = work + keeping + extra
        return values

    def objective(self, problem: AllocationProblem, widths: Mapping[int, int]) -> float:
        """Value of the widths less the cost of the flotillas they need, in device equivalents.

        Raises:
            KeyError: A width is not admissible.
        """
        values = self.values(problem)
        work = sum(values[option] for option in widths.items())
        return work - self.flotilla_cost * len(group_widths(problem, widths))

    def _solve(
        self, problem: AllocationProblem, values: Mapping[Option, float]
    ) -> tuple[Widths, str, float | None]:
        wish = _best_widths(values)
        if sum(wish.values()) <= problem.num_devices and len(group_widths(problem, wish)) <= 1:
            return wish, "trivial", 0.0
        return self._run_solver(problem, values)

    def _run_solver(
        self, problem: AllocationProblem, values: Mapping[Option, float]
    ) -> tuple[Widths, str, float | None]:
        # Imported late: the driver names this class, but only the solver process loads CBC.
        import mip

        solved = (mip.OptimizationStatus.OPTIMAL, mip.OptimizationStatus.FEASIBLE)
        try:
            model, x = self._model(problem, values)
            status = model.optimize(max_seconds=problem.time_limit_s)
            chosen = [option for option, var in x.items() if status in solved and var.x > 0.5]
            gap = float(model.gap) if status in solved else math.inf
        except Exception as error:
            raise AllocationFailed(f"CBC failed: {type(error).__name__}: {error}") from error
        if status not in solved:
            raise AllocationFailed(
                f"CBC ended with {status.name} after at most {problem.time_limit_s:g} s."
            )
        _logger.debug("CBC: %s, gap %g, %d options", status.name, gap, len(x))
        return dict(chosen), status.name.lower(), gap if math.isfinite(gap) else None

    def _model(
        self, problem: AllocationProblem, values: Mapping[Option, float]
    ) -> tuple[Any, dict[Option, Any]]:
        import mip

        model = mip.Model(sense=mip.MAXIMIZE, solver_name=mip.CBC)
        model.verbose = 0
        model.threads = 1
        model.preprocess = 0  # CBC of python-mip 2.0 aborts in its preprocessing on valid models
        model.cuts = 0  # measured 2 to 20 times faster with 60 to 200 trials
        model.max_mip_gap = _RELATIVE_GAP
        x = {option: model.add_var(var_type=mip.BINARY) for option in values}
        by_number = problem.by_number
        rates = {(t, m): by_number[t].rate(m) for t, m in values}
        slowest = reference_rates(rates.values())
        y = [model.add_var(var_type=mip.BINARY) for _ in slowest]
        work = mip.xsum(values[option] * var for option, var in x.items())
        model.objective = _OBJECTIVE_SCALE * (work - self.flotilla_cost * mip.xsum(y))
        model += mip.xsum(m * var for (_, m), var in x.items()) <= problem.num_devices
        if self.max_flotillas is not None:
            model += mip.xsum(y) <= self.max_flotillas
        for trial in _by_trial(x).values():
            model += mip.xsum(x[option] for option in trial) <= 1
            for window, options in _by_window(trial, rates, slowest, problem.rate_spread).items():
                model += mip.xsum(x[o] for o in options) <= mip.xsum(y[k] for k in window)
        return model, x

    def _better(
        self, problem: AllocationProblem, values: Mapping[Option, float], widths: Widths
    ) -> Widths:
        """What the solver found in time or, if worth more, what flies now plus greedy."""
        plan = GreedyAllocator(keep_flying=True).allocate(problem)
        greedy = {t: len(a.devices) for t, a in plan.assignments.items()}
        admissible = all(option in values for option in greedy.items())
        allowed = self.max_flotillas is None or len(plan.flotillas) <= self.max_flotillas
        if not (admissible and allowed):
            return widths
        return max(greedy, widths, key=lambda w: self.objective(problem, w))


def reference_rates(rates: Iterable[float]) -> list[float]:
    """Rates that may be the slowest of a flotilla, at most ``MAX_REFERENCE_RATES`` of them.

    Thinned ones are even in the logarithm and rounded up to a rate that occurs, so that a rate
    above one stays close to one.
    """
    distinct = sorted(set(rates))
    if len(distinct) <= MAX_REFERENCE_RATES:
        return distinct
    step = (distinct[-1] / distinct[0]) ** (1 / (MAX_REFERENCE_RATES - 1))
    grid = [distinct[0] * step**k * (1 - 1e-12) for k in range(MAX_REFERENCE_RATES)]
    return sorted({next((r for r in distinct if r >= g), distinct[-1]) for g in grid})


def _widths(candidate: Candidate, kept: int | None, limit: int) -> list[int]:
    widths = set(candidate.useful_widths(limit))
    if kept is not None and candidate.min_devices <= kept <= candidate.widest:
        widths.add(kept)
    return sorted(widths)


def _by_trial(options: Iterable[Option]) -> dict[int, list[Option]]:
    by_trial: dict[int, list[Option]] = defaultdict(list)
    for number, m in options:
        by_trial[number].append((number, m))
    return by_trial


def _by_window(
    trial: Sequence[Option],
    rates: Mapping[Option, float],
    slowest: Sequence[float],
    rate_spread: float,
) -> dict[tuple[int, ...], list[Option]]:
    """Options of one trial by the flotillas that admit them; one row serves all of a window."""
    windows: dict[tuple[int, ...], list[Option]] = defaultdict(list)
    for option in trial:
        rate = rates[option]
        admitting = (k for k, rho in enumerate(slowest) if rho <= rate <= rho * rate_spread)
        windows[tuple(admitting)].append(option)
    return windows


def _best_widths(values: Mapping[Option, float]) -> Widths:
    best: dict[int, tuple[float, int]] = {}
    for (number, m), value in values.items():
        best[number] = max(best.get(number, (-math.inf, 0)), (value, -m))
    return {number: -m for number, (_, m) in best.items()}
