"""Fleets of several device types, for allocators that know of one: users' own."""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass, replace

from optuna_fleet.alloc.assembly import plan_of
from optuna_fleet.alloc.draft import Draft, homes
from optuna_fleet.alloc.placement import place
from optuna_fleet.alloc.problem import SEVERAL, AllocationProblem, Allocator, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class ByKind:
    """An :class:`Allocator` of one device type, for fleets of several as well.

    Each type is an ordinary problem, with the trials that fly there or have least to wait there.
    Trials that need devices of several types, or are on a mixture, come first.

    Attributes:
        inner: Decides for one type, and sees problems without types; or, if it says so by an
            attribute ``knows_types``, for all at once.
    """

    inner: Allocator

    @property
    def name(self) -> str:
        """Name of the inner allocator."""
        return self.inner.name

    def allocate(self, problem: AllocationProblem) -> Plan:
        """Solves ``problem``; see :class:`Allocator`.

        Raises:
            AllocationFailed: The inner allocator has no answer.
        """
        if not problem.kinds or getattr(self.inner, "knows_types", False):
            return self.inner.allocate(problem)
        on, draft = homes(problem), Draft(problem)
        for number, candidate in problem.by_number.items():
            if on[number] == SEVERAL and number not in problem.pinned:
                kept = problem.kept_width(candidate) or candidate.min_devices
                draft.give(number, SEVERAL, kept)
        whole = place(problem, draft.choice)
        placed = {t: devices for t, devices in whole.items() if on[t] == SEVERAL}
        taken = {device for devices in placed.values() for device in devices}
        groups, reasons = [[number] for number in placed], []
        for kind in problem.num_by_kind:
            numbers = {t for t in on if on[t] == kind}
            plan = self.inner.allocate(_part(problem, kind, numbers, taken))
            placed |= {t: a.devices for t, a in plan.assignments.items()}
            groups += [[a.number for a in f.assignments] for f in plan.flotillas]
            reasons.append(f"{kind}: {plan.reason}")
        plan = plan_of(problem, placed, groups=groups, allocator=self.name)
        return replace(plan, reason="; ".join([plan.reason, *reasons]))


def _part(
    problem: AllocationProblem, kind: str, numbers: Set[int], taken: Set[int]
) -> AllocationProblem:
    """These trials on the devices of that type that are not taken, with its share of the rest."""
    there = zip(problem.kinds, problem.nodes, strict=True)
    nodes = tuple(tuple(d for d in node if d not in taken) for k, node in there if k == kind)
    share = sum(map(len, nodes)) / max(problem.num_devices, 1)
    capacity = problem.preprocess_samples_per_s
    candidates = []
    for number in sorted(numbers):
        c = problem.by_number[number].as_on(kind)
        if problem.kind_now(problem.by_number[number]) not in ("", kind):  # it leaves a mixture
            own = tuple(d for d in c.devices if problem.kind_of([d]) == kind)
            c = replace(c, devices=own, movable=True)
        candidates.append(c)
    return replace(
        problem,
        candidates=tuple(candidates),
        nodes=nodes,
        kinds=(),
        num_to_come=math.ceil(problem.num_to_come * share),
        preprocess_samples_per_s=None if capacity is None else max(1e-9, capacity * share),
    )
