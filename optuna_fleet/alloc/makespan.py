"""Widths that finish the sweep soonest, when nobody knows how long its trials will train.

The work left of each trial is its expected remaining epochs (:mod:`optuna_fleet.alloc.lengths`).
The fluid optimum of that work gives fractional widths (:mod:`optuna_fleet.alloc.fluid`), rounded
to whole ones so that as little as possible moves. Trials with long epochs aim to finish a little
earlier than the others: should they turn out longer than expected, there is less to be done about
it, for they move seldom and their last devices help least.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from optuna_fleet.alloc.adjust import Wishes
from optuna_fleet.alloc.fluid import FloatArray, Rates, fluid_optimum
from optuna_fleet.alloc.lengths import SurvivalCurve, survival_curve
from optuna_fleet.alloc.problem import AllocationProblem, Candidate

_HALF_AN_EPOCH = 0.5
_ROUNDING = 1e-6
_MOST_TO_COME = 4
"""Trials per device; with so many or more to come nobody is to be wide."""


def makespan_wishes(problem: AllocationProblem, hedge: float) -> Wishes:
    """Ideal widths of all candidates, as if everyone could move now.

    Args:
        problem: The problem; at least one candidate and device.
        hedge: Trials aim to finish at a time proportional to (seconds per epoch) ** -hedge; 0 for
            all at once.

    Returns:
        Widths in order of priority: those furthest from waiting first. To grow pays if the trial
        is expected to end sooner for it.
    """
    known = list(problem.by_number.values())
    candidates = known + _to_come(problem, known)
    work = _expected_work(problem, candidates)
    speed = np.array([c.rate(c.min_devices) / c.samples_per_epoch for c in candidates])
    rates = [_reachable(c) for c in candidates]
    _, fluid = fluid_optimum(rates, work * (speed.max() / speed) ** hedge, problem.num_devices)
    order = sorted(range(len(candidates)), key=lambda i: (-fluid[i], -candidates[i].number))
    widths = _rounded(problem, candidates, fluid)
    left = {c.number: float(w) for c, w in zip(candidates, work, strict=True)}

    def pays(candidate: Candidate, now: int, m: int) -> bool:
        if now == 0:
            return True
        samples = left[candidate.number]
        return candidate.rescale_up_s + samples / candidate.rate(m) < samples / candidate.rate(now)

    wanted = [i for i in order if widths[i] and i < len(known)]
    return Wishes(widths={candidates[i].number: widths[i] for i in wanted}, pays=pays)


def _to_come(problem: AllocationProblem, known: Sequence[Candidate]) -> list[Candidate]:
    """The trials that are still to be proposed, as if they waited: like the known ones.

    They get no devices, but nobody is widened with what they will need.
    """
    total = min(problem.num_to_come, _MOST_TO_COME * problem.num_devices)
    by_speed = sorted(known, key=lambda c: (c.rate(c.min_devices) / c.samples_per_epoch, c.number))
    models = [by_speed[(2 * k + 1) * len(known) // (2 * total)] for k in range(total)]
    last = known[-1].number
    return [
        replace(
            c,
            number=last + k,
            devices=(),
            waited_rounds=0,
            epochs_done=0,
            predicted_epochs=None,
            movable=True,
            is_within_epoch=False,
        )
        for k, c in enumerate(models, 1)
    ]


def _reachable(candidate: Candidate) -> Rates:
    """Its rates; on fewer devices than it fits on, what time-sharing the fewest would give."""
    least = candidate.min_devices
    shared = tuple(candidate.rate(least) * m / least for m in range(1, least))
    return shared + candidate.rates[least - 1 : candidate.widest]


def _expected_work(problem: AllocationProblem, candidates: Sequence[Candidate]) -> FloatArray:
    """Samples each candidate is expected to train still."""
    under_way = [c.epochs_done for c in problem.candidates]
    curve = survival_curve(problem.finished_epochs, under_way, problem.bounded_epochs)
    return np.array([_samples_left(c, curve) for c in candidates])


def _samples_left(candidate: Candidate, curve: SurvivalCurve) -> float:
    epochs = curve.remaining_epochs(
        candidate.epochs_done, candidate.max_epochs, candidate.predicted_epochs
    )
    if not candidate.movable:  # it is somewhere within an epoch
        epochs -= _HALF_AN_EPOCH
    return epochs * candidate.samples_per_epoch


def _rounded(
    problem: AllocationProblem, candidates: Sequence[Candidate], fluid: FloatArray
) -> list[int]:
    """Useful widths: rounded up first for those who have these devices already, then by remainder.

    Whoever is rounded down so far that it could not fly leaves its devices to the others, but not
    within an epoch: trials would take turns at each event, and none would get anywhere.
    """
    useful = [c.useful_widths(problem.num_devices) for c in candidates]
    shares = (fluid + _ROUNDING).tolist()
    widths = [_widest(u, share) for u, share in zip(useful, shares, strict=True)]
    held = [problem.kept_width(c) or 0 for c in candidates]
    least = [
        _narrowest(u, h) if c.is_within_epoch else 0
        for c, u, h in zip(candidates, useful, held, strict=True)
    ]
    widths = [max(pair) for pair in zip(widths, least, strict=True)]
    while sum(widths) > problem.num_devices:
        spare = [i for i, m in enumerate(widths) if m > least[i]]
        i = min(spare, key=lambda i: (fluid[i] / widths[i], candidates[i].number))
        widths[i] = max(least[i], _widest(useful[i], widths[i] - 1))
    left, before = problem.num_devices - sum(widths), 0
    while left != before:
        before = left
        # Anew each time round: else what is left over would wander from decision to decision.
        order = [
            (held[i] <= m, m - fluid[i], -candidates[i].number, i) for i, m in enumerate(widths)
        ]
        for *_, i in sorted(order):
            wider = next((m for m in useful[i] if m > widths[i]), math.inf)
            if wider <= widths[i] + left:
                left -= int(wider) - widths[i]
                widths[i] = int(wider)
    return widths


def _narrowest(widths: Sequence[int], limit: int) -> int:
    """The narrowest up to the limit; 0 if there is none."""
    return min((m for m in widths if m <= limit), default=0)


def _widest(widths: Sequence[int], limit: float) -> int:
    """The widest up to the limit; 0 if there is none."""
    return max((m for m in widths if m <= limit), default=0)
