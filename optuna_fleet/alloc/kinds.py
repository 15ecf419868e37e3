"""Fleets of several device types: which trial flies on which, around any allocator.

Trials that get devices of several types come first (:mod:`optuna_fleet.alloc.spanning`). All
others are on devices of one type at a time, so their types can be decided next: a count problem
over all of them says where each trial is worth most (:mod:`optuna_fleet.alloc.counts`, which has
kinds for this). What is left are ordinary problems, one per type.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from optuna_fleet.alloc.counts import MAX_CELLS, Array, CountProblem, solve_exactly
from optuna_fleet.alloc.counts_mip import solve_by_mip
from optuna_fleet.alloc.greedy import GreedyAllocator
from optuna_fleet.alloc.problem import (
    SEVERAL,
    AllocationFailed,
    AllocationProblem,
    Allocator,
    Candidate,
    Plan,
)
from optuna_fleet.alloc.spanning import plan_mixtures, without
from optuna_fleet.alloc.streams import affordable, stream_limit

Kinds = dict[int, str]
"""Trial number -> device type."""

_EXACT_STEPS = 300_000_000
"""Steps of dynamic programming that take a fraction of a second."""

_LEAST_CAPACITY = 1e-300


@dataclass(frozen=True, slots=True, kw_only=True)
class ByKind:
    """Any :class:`Allocator`, for fleets of several device types as well.

    It first decides each trial's type, then asks ``inner`` about each type alone and merges the
    plans. n devices of type k are worth to a trial ``forward_looking_s * r_k(n)``, measured in its
    best rate on one device of any type, less what the move costs; the types are those of the
    widths that are worth most together. So those fly on the fast devices who gain most by them,
    and a trial changes its type only if that pays within ``forward_looking_s``; should ``inner``
    then give it less than that takes, it keeps its type after all. Trials that get nothing wait
    where their turn should come first.

    Trials that can't move stay, so that two flying ones never swap types unless both can move.
    With one type the plan is that of ``inner``. With several its status is "heuristic", whatever
    ``inner`` says of the parts.

    Attributes:
        inner: Decides for one type, and who gets a mixture; sees problems without types.
        forward_looking_s: Seconds for which a decision is expected to last.
        cautious: No flying trial changes its type, and no solver is used: for a fallback, which
            must not fail.
    """

    inner: Allocator
    forward_looking_s: float = 120.0
    cautious: bool = False

    @property
    def name(self) -> str:
        """Name of the inner allocator."""
        return self.inner.name

    def allocate(self, problem: AllocationProblem) -> Plan:
        """Solves ``problem``; see :class:`Allocator`.

        Raises:
            AllocationFailed: The inner allocator has no answer.
        """
        if not problem.kinds:
            return self.inner.allocate(problem)
        kinds = list(problem.num_by_kind)
        if len(kinds) == 1:
            return self.inner.allocate(_part(problem, kinds[0], problem.by_number))
        # The mixtures, then twice at most the types and all the parts.
        share = replace(problem, time_limit_s=problem.time_limit_s / (2 * len(kinds) + 3))
        limit = stream_limit(problem)
        mixtures = plan_mixtures(share, self.inner, cautious=self.cautious)
        before = {SEVERAL: mixtures} if mixtures else {}
        homes, problem = _flying(problem), without(share, mixtures)
        fixed = _flying(problem, problem.pinned)
        if self.cautious:  # those too whose devices a mixture has taken
            homes = {t: k for t, k in homes.items() if t in problem.by_number and k != SEVERAL}
            fixed = homes | _flying(problem)
        decided = self._decided(problem, fixed)
        plan = self._planned(problem, decided, before, limit)
        if kept := self._regretted(problem, decided, plan):
            plan = self._planned(problem, self._decided(problem, fixed | kept), before, limit)
        return plan

    # -- types ------------------------------------------------------------------------------------

    def _decided(self, problem: AllocationProblem, fixed: Kinds) -> Kinds:
        decided = fixed if self.cautious else self._worth_most(problem, fixed)
        return _with_waiting(problem, _flying(problem) | decided)

    def _worth_most(self, problem: AllocationProblem, fixed: Kinds) -> Kinds:
        """Types of the trials that get devices in the best choice of widths; maybe none."""
        kinds = list(problem.num_by_kind)
        room = dict(problem.num_by_kind)
        for number, m in problem.pinned.items():
            room[fixed[number]] -= m
        free = [c for t, c in problem.by_number.items() if t not in problem.pinned]
        counting = CountProblem(
            values=tuple(self._worth(problem, c, fixed.get(c.number)) for c in free),
            capacities=tuple(room.values()),
        )
        try:
            if _is_small(counting):
                counts = solve_exactly(counting)
            else:
                counts = solve_by_mip(counting, problem.time_limit_s)
        except AllocationFailed:
            return {}
        return {c.number: kinds[k] for c, (k, n) in zip(free, counts.widths, strict=True) if n}

    def _worth(
        self, problem: AllocationProblem, candidate: Candidate, only: str | None = None
    ) -> Array:
        """Worth of n devices of each type, of ``only`` one type if given."""
        kinds = list(problem.num_by_kind)
        rates = np.array([(0.0, *candidate.rates_on(k)[: candidate.widest]) for k in kinds])
        outcomes = rates / rates[:, 1].max()
        worth: Array = self.forward_looking_s * outcomes
        now = min(problem.kept_width(candidate) or 0, candidate.widest)
        if now:
            home = kinds.index(problem.kind_now(candidate))
            cost_s = np.full(worth.shape, candidate.rescale_up_s)
            cost_s[home, :now] = cost_s[:, 0] = candidate.rescale_down_s
            cost_s[home, now] = 0.0
            worth -= outcomes[home, now] * cost_s
        worth[:, 1 : candidate.min_devices] = -math.inf
        worth[[only not in (None, k) for k in kinds], 1:] = -math.inf
        return worth

    def _regretted(self, problem: AllocationProblem, decided: Kinds, plan: Plan) -> Kinds:
        """Trials for which their new type does not pay at the width they got: type before."""
        regretted: Kinds = {}
        kinds = list(problem.num_by_kind)
        assignments = plan.assignments
        for number, home in _flying(problem).items():
            c = problem.by_number[number]
            now = problem.kept_width(c) or 0
            if decided[number] == home or not c.min_devices <= now <= c.widest:
                continue
            worth = self._worth(problem, c)
            m = len(assignments[number].devices) if number in assignments else 0
            if worth[kinds.index(decided[number]), m] <= worth[kinds.index(home), now]:
                regretted[number] = home
        return regretted

    # -- plans ------------------------------------------------------------------------------------

    def _planned(
        self, problem: AllocationProblem, kinds: Kinds, before: Mapping[str, Plan], limit: float
    ) -> Plan:
        plans = dict(before)
        for kind, part in _parts(problem, kinds, plans, limit):
            if part.candidates or part.num_devices:  # mixtures may have all
                plans[kind] = self.inner.allocate(part)
        if not any(plan.flotillas for plan in plans.values()):
            bound = _flying(problem) if self.cautious else {}
            alone = _slowest_alone(problem, bound)
            plans |= {kind: self.inner.allocate(part) for kind, part in alone}
        return _merged(self.name, plans)


def _flying(problem: AllocationProblem, numbers: Iterable[int] | None = None) -> Kinds:
    """Types of the trials that fly, of all or of these."""
    of_these = problem.by_number if numbers is None else numbers
    now = {t: problem.kind_now(problem.by_number[t]) for t in of_these}
    return {t: kind for t, kind in now.items() if kind}


def _is_small(problem: CountProblem) -> bool:
    """Whether dynamic programming over all types at once is fast."""
    most = sum(values.shape[1] - 1 for values in problem.values)
    cells = math.prod(min(capacity, most) + 1 for capacity in problem.capacities)
    widths = sum(min(v.shape[1] - 1, c) for v in problem.values for c in problem.capacities)
    return bool(cells * len(problem.values) <= MAX_CELLS and cells * widths <= _EXACT_STEPS)


def _with_waiting(problem: AllocationProblem, kinds: Kinds) -> Kinds:
    """Gives the other trials a type too: where devices have the least to do, theirs included.

    As nobody knows how long trials train, each has as much to do as any other.
    """
    shared = dict(kinds)
    load = dict.fromkeys(problem.num_by_kind, 0.0)
    for number, kind in kinds.items():
        load[kind] += _slowness(problem, problem.by_number[number], kind)

    def busy(candidate: Candidate, kind: str) -> tuple[bool, float]:
        total = problem.num_by_kind[kind]
        time = load[kind] + _slowness(problem, candidate, kind)
        return candidate.min_devices > total, time / max(total, 1)

    for number, candidate in problem.by_number.items():
        if number not in shared:
            kind = min(load, key=lambda k: busy(candidate, k))
            load[kind] += _slowness(problem, candidate, kind)
            shared[number] = kind
    return shared


def _slowness(problem: AllocationProblem, candidate: Candidate, kind: str) -> float:
    """How many times longer it takes there than on the type that suits it best."""
    best = max(candidate.rates_on(k)[0] for k in problem.num_by_kind)
    return best / candidate.rates_on(kind)[0]


def _part(problem: AllocationProblem, kind: str, numbers: Iterable[int]) -> AllocationProblem:
    """These trials on the devices of that type, with its share of the trials to come."""
    there = zip(problem.kinds, problem.nodes, strict=True)
    share = problem.num_by_kind[kind] / max(problem.num_devices, 1)
    return replace(
        problem,
        candidates=tuple(_on(problem, problem.by_number[t], kind) for t in sorted(numbers)),
        nodes=tuple(node for k, node in there if k == kind),
        kinds=(),
        num_to_come=math.ceil(problem.num_to_come * share),
    )


def _on(problem: AllocationProblem, candidate: Candidate, kind: str) -> Candidate:
    there = candidate.as_on(kind)
    stays = problem.kind_now(candidate) in (kind, "")
    return there if stays else replace(there, devices=(), movable=True)


def _parts(
    problem: AllocationProblem, kinds: Kinds, plans: Mapping[str, Plan], limit: float
) -> Iterator[tuple[str, AllocationProblem]]:
    """One problem per type, each with what ``plans`` before it leave of the stream limit.

    Trials that can't move may have streams of their own, so that much is kept for them. Where not
    even the slowest further trial could be served, nobody starts.
    """
    pinned = {k: [t for t in problem.pinned if kinds[t] == k] for k in problem.num_by_kind}
    reserved = {
        k: sum(problem.by_number[t].rate(problem.pinned[t]) for t in numbers)
        for k, numbers in pinned.items()
    }
    for kind in problem.num_by_kind:
        part = _part(problem, kind, (t for t, k in kinds.items() if k == kind))
        del reserved[kind]
        if math.isfinite(limit):
            drawn = sum(f.stream_rate for plan in plans.values() for f in plan.flotillas)
            left = limit - drawn - sum(reserved.values())
            part = replace(part, preprocess_samples_per_s=max(left, _LEAST_CAPACITY))
            if not affordable(stream_limit(part), left):
                stay = [c for c in part.candidates if c.number in pinned[kind]]
                part = replace(part, candidates=tuple(stay))
        yield kind, part


def _slowest_alone(
    problem: AllocationProblem, bound: Kinds
) -> Iterator[tuple[str, AllocationProblem]]:
    """Where nothing can be served, the slowest trial flies, as with one type; see `streams`.

    Those that are ``bound`` to a type fly on no other.
    """
    slowest = min(
        (
            (c.rates_on(kind)[c.min_devices - 1], t, kind)
            for kind, total in problem.num_by_kind.items()
            for t, c in problem.by_number.items()
            if c.min_devices <= total and bound.get(t, kind) == kind
        ),
        default=None,
    )
    if slowest and problem.preprocess_samples_per_s is not None:
        _, number, kind = slowest
        yield kind, _part(problem, kind, [number])


def _merged(name: str, plans: Mapping[str, Plan]) -> Plan:
    statuses = [plan.status for plan in plans.values()]
    fallbacks = [status for status in statuses if status.startswith("fallback")]
    status = "trivial" if set(statuses) == {"trivial"} else "heuristic"
    return Plan(
        flotillas=tuple(flotilla for plan in plans.values() for flotilla in plan.flotillas),
        allocator=name,
        reason="; ".join(f"{kind}: {plan.reason}" for kind, plan in plans.items())
        or "no trials, no devices",
        status=fallbacks[0] if fallbacks else status,
    )


CAUTIOUS = ByKind(inner=GreedyAllocator(keep_flying=True), cautious=True)
"""The fallback of every policy."""
