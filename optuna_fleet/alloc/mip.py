"""The exact allocation, by mixed-integer programming (python-mip with CBC).

Binaries: x[i, m], trial i flies on m devices; y[rho], a flotilla is open whose rates are within
``[rho, rho * rate_spread]``; y[rho, phase] where phases count. Each trial flies on one width at
most, only under an open flotilla that admits its rate there, and the widths sum to at most the
devices. One model decides about all flotillas: flotilla after flotilla, the first would break up
those that fly already. Where the preprocessors' capacity counts, rho is the flotilla's *fastest*
rate, the window ``[rho / rate_spread, rho]``, and the sum of ``rho * y`` is bounded: exact, as
long as all rates are tried, and else on the safe side (see :mod:`optuna_fleet.alloc.windows`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from optuna_fleet.alloc.assembly import assemble, fill_idle
from optuna_fleet.alloc.cbc import choose, new_model
from optuna_fleet.alloc.greedy import GreedyAllocator
from optuna_fleet.alloc.problem import AllocationProblem, Candidate, Plan
from optuna_fleet.alloc.streams import Widths, group_widths, serves, stream_limit
from optuna_fleet.alloc.windows import Option, by_window, phases_of, windows

_TIE = 1e-3
_OBJECTIVE_SCALE = 1000.0  # CBC takes objectives that differ by 1e-4 for equal
_RELATIVE_GAP = 1e-6


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
    """

    rescale_penalty: float = 0.25
    waiting_bonus: float = 0.01
    flotilla_cost: float = 0.25
    name: str = field(default="mip", init=False)

    def allocate(self, problem: AllocationProblem) -> Plan:
        """Solves ``problem``; see :class:`Allocator`.

        Raises:
            AllocationFailed: The solver found nothing within ``time_limit_s``, or failed.
        """
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
        )

    def values(self, problem: AllocationProblem) -> dict[Option, float]:
        """What each admissible (trial, width) is worth, in device equivalents."""
        values: dict[Option, float] = {}
        pinned = problem.pinned
        for rank, candidate in enumerate(problem.by_number.values()):
            extra = self.waiting_bonus * candidate.waited_rounds
            # Among equals rather more trials than wider ones, and the elder ones.
            extra += _TIE * (1 - rank / len(problem.candidates))
            kept = problem.kept_width(candidate)
            widths = _widths(candidate, kept, problem.num_devices)
            for m in [pinned[candidate.number]] if candidate.number in pinned else widths:
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
        is_one = len(group_widths(problem, wish)) <= 1 and serves(problem)(wish)
        if is_one and sum(wish.values()) <= problem.num_devices:
            return wish, "trivial", 0.0
        return self._run_solver(problem, values)

    def _run_solver(
        self, problem: AllocationProblem, values: Mapping[Option, float]
    ) -> tuple[Widths, str, float | None]:
        make = partial(self._model, problem, values)
        chosen, status, gap = choose(make, problem.time_limit_s)
        return dict(chosen), status, gap

    def _model(
        self, problem: AllocationProblem, values: Mapping[Option, float]
    ) -> tuple[Any, dict[Option, Any]]:
        import mip

        model = new_model()
        model.cuts = 0  # measured 2 to 20 times faster with 60 to 200 trials
        model.max_mip_gap = _RELATIVE_GAP
        x = {option: model.add_var(var_type=mip.BINARY) for option in values}
        by_number = problem.by_number
        rates = {(t, m): by_number[t].rate(m) for t, m in values}
        tried = windows(problem, rates)
        y = [model.add_var(var_type=mip.BINARY) for _ in tried]
        work = mip.xsum(values[option] * var for option, var in x.items())
        model.objective = _OBJECTIVE_SCALE * (work - self.flotilla_cost * mip.xsum(y))
        model += mip.xsum(m * var for (_, m), var in x.items()) <= problem.num_devices
        limit = stream_limit(problem)
        if math.isfinite(limit):
            # As shares of the limit: CBC's tolerance is absolute, ours relative.
            drawn = (w.rate / limit * var for w, var in zip(tried, y, strict=True))
            model += mip.xsum(drawn) <= 1
        for number, m in problem.pinned.items():
            model += x[number, m] == 1
        phases = phases_of(problem)
        for number, trial in _by_trial(rates).items():
            model += mip.xsum(x[option] for option in trial) <= 1
            own = {k: window for k, window in enumerate(tried) if window.phase == phases[number]}
            for admitting, options in by_window(trial, own, problem.rate_spread).items():
                model += mip.xsum(x[o] for o in options) <= mip.xsum(y[k] for k in admitting)
        return model, x

    def _better(
        self, problem: AllocationProblem, values: Mapping[Option, float], widths: Widths
    ) -> Widths:
        """What the solver found in time or, if worth more, what flies now plus greedy."""
        plan = GreedyAllocator(keep_flying=True).allocate(problem)
        greedy = {t: len(a.devices) for t, a in plan.assignments.items()}
        if not all(option in values for option in greedy.items()):
            return widths
        return max(greedy, widths, key=lambda w: self.objective(problem, w))


def _widths(candidate: Candidate, kept: int | None, limit: int) -> list[int]:
    widths = set(candidate.useful_widths(limit))
    if kept is not None and candidate.min_devices <= kept <= candidate.widest:
        widths.add(kept)
    return sorted(widths)


def _by_trial(rates: Mapping[Option, float]) -> dict[int, dict[Option, float]]:
    by_trial: dict[int, dict[Option, float]] = defaultdict(dict)
    for option, rate in rates.items():
        by_trial[option[0]][option] = rate
    return by_trial


def _best_widths(values: Mapping[Option, float]) -> Widths:
    best: dict[int, tuple[float, int]] = {}
    for (number, m), value in values.items():
        best[number] = max(best.get(number, (-math.inf, 0)), (value, -m))
    return {number: -m for number, (_, m) in best.items()}
