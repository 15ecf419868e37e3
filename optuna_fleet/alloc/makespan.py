"""What devices are worth for a sweep to be done soon, when nobody knows how long trials train.

The work left of each trial is its expected remaining epochs (:mod:`optuna_fleet.alloc.lengths`).
The fluid optimum of that work says at which pace each trial should go on, so how many devices it
should have: f, a fraction. The next device is worth as much as is missing of that, 2 (f - m), so m
are worth m (1 + 2 f - m), and the best whole numbers are f rounded. Trials with long epochs aim to
finish a little earlier than the others: should they turn out longer than expected, there is less
to be done about it, for they move seldom and their last devices help least.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from optuna_fleet.alloc.fluid import FloatArray, Rates, devices_for, fluid_paces
from optuna_fleet.alloc.lengths import SurvivalCurve, survival_curve
from optuna_fleet.alloc.problem import SEVERAL, AllocationProblem, Candidate
from optuna_fleet.alloc.program import Worth

_HALF_AN_EPOCH = 0.5
_MOST_TO_COME = 4
"""Trials per device; with so many or more to come nobody is to be wide."""
_KEEPING = 1.0
"""Worth, in devices, of keeping what one has: else trials would swap devices at each event."""
_SUITING = 1.0
"""Of the device type that suits a trial best: those get the fast ones who gain most by them."""
_ANY = 1e-3
"""Of devices that are of little use: better than to wait."""
_FLYING = 1e4
"""Of not waiting within an epoch: trials would take turns at each event, and none get anywhere."""


def makespan_worth(problem: AllocationProblem, hedge: float) -> Worth:
    """The worth of devices to each trial, in devices.

    Args:
        problem: The problem; at least one candidate and device.
        hedge: Trials aim to finish at a time proportional to (seconds per epoch) ** -hedge; 0 for
            all at once.
    """
    known = list(problem.by_number.values())
    candidates = known + _to_come(problem, known)
    kinds = problem.num_by_kind
    work = _expected_work(problem, candidates)
    fastest = [max(c.rates_on(k)[c.min_devices - 1] for k in kinds) for c in candidates]
    speed = np.array(fastest) / [c.samples_per_epoch for c in candidates]
    rates = [_reachable(problem, c) for c in candidates]
    paces = fluid_paces(rates, work * (speed.max() / speed) ** hedge, kinds)
    shares = {
        c.number: {kind: devices_for(of[kind], pace) for kind in of}
        for c, of, pace in zip(known, rates, paces.tolist(), strict=False)
    }
    left = dict(zip((c.number for c in known), work.tolist(), strict=False))

    def worth(candidate: Candidate, kind: str) -> Iterator[tuple[int, float]]:
        of = shares[candidate.number]
        own = of.get(kind, min(of.values()))
        gains = _gains(problem, candidate, kind, min(of.values()), own, left[candidate.number])
        if len(kinds) == 1:
            return gains
        return ((m, gain + _SUITING * _suits(problem, candidate, kind, m)) for m, gain in gains)

    return worth


def _gains(
    problem: AllocationProblem,
    candidate: Candidate,
    kind: str,
    least: float,
    share: float,
    samples: float,
) -> Iterator[tuple[int, float]]:
    """Gains of widths on one type.

    Args:
        problem: The problem.
        candidate: The trial.
        kind: The type.
        least: Devices it should have of the type that suits it best.
        share: Devices of this type that make up for these.
        samples: What it is expected to train still.
    """
    now = problem.kept_width(candidate) or 0
    is_home = bool(now) and problem.kind_now(candidate) == kind
    speed_now = candidate.rate(now) if now else 0.0
    is_kept = 0 < now <= math.ceil(share)
    flying = _FLYING if now and candidate.is_within_epoch else 0.0
    for m in problem.widths(candidate, kind):
        rate = candidate.rates_on(kind)[m - 1]
        is_costly = 0 < speed_now < rate and not (is_home and m == now)
        if is_costly and candidate.rescale_up_s + samples / rate >= samples / speed_now:
            yield m, _ANY + flying  # it would end no sooner, the move included
            continue
        devices, fewest = m * least / share, candidate.min_devices * least / share
        gain = max(2 * _ANY, devices * (fewest + 2 * least - devices))
        gain += _KEEPING if is_kept and rate >= speed_now else 0.0
        yield m, gain + flying


def _suits(problem: AllocationProblem, candidate: Candidate, kind: str, m: int) -> float:
    """Its rate on so many devices of a type, as a share of that on those which suit it best."""
    kinds = [k for k, n in problem.num_by_kind.items() if n >= m]
    there = candidate.rates_on(kind)[m - 1]
    return there / max([there, *(candidate.rates_on(k)[m - 1] for k in kinds)])


def _to_come(problem: AllocationProblem, known: Sequence[Candidate]) -> list[Candidate]:
    """The trials that are still to be proposed, as if they waited: like the known ones.

    They get no devices, but nobody is widened with what they will need.
    """
    total = min(problem.num_to_come, _MOST_TO_COME * problem.num_devices)
    by_speed = sorted(known, key=lambda c: (c.rate(c.min_devices) / c.samples_per_epoch, c.number))
    models = [by_speed[(2 * k + 1) * len(known) // (2 * total)] for k in range(total)]
    return [
        replace(
            c,
            devices=(),
            waited_rounds=0,
            epochs_done=0,
            predicted_epochs=None,
            movable=True,
            is_within_epoch=False,
        )
        for c in models
    ]


def _reachable(problem: AllocationProblem, candidate: Candidate) -> Mapping[str, Rates]:
    """Its rates; on fewer devices than it fits on, what time-sharing the fewest would give."""
    least = candidate.min_devices
    kinds = [*problem.num_by_kind, *([SEVERAL] if candidate.spans_types else [])]
    reachable = {}
    for kind in kinds:
        rates = candidate.rates_on(kind)[: candidate.widest]
        shared = tuple(rates[least - 1] * m / least for m in range(1, least))
        reachable[kind] = shared + rates[least - 1 :]
    return reachable


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
