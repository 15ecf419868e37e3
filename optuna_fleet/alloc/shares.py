"""Choices: how many devices of which type each trial gets, before anybody says which ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from optuna_fleet.alloc.problem import SEVERAL, AllocationProblem, Candidate
from optuna_fleet.alloc.streams import Widths, group_widths

Share = dict[str, int]
"""Device type -> devices, at least one; the type is "" where all are alike."""

Choice = dict[int, Share]
"""Trial number -> what it gets; who waits is not in it."""


Placement = dict[int, tuple[int, ...]]
"""Trial number -> devices."""


def pinned_choice(problem: AllocationProblem) -> Choice:
    """What trials have that can't move."""
    by_number = problem.by_number
    return {number: share_of(problem, by_number[number].devices) for number in problem.pinned}


def share_of(problem: AllocationProblem, devices: tuple[int, ...]) -> Share:
    """What these devices are."""
    return dict(Counter(problem.kind_of([device]) for device in devices))


def kind_of_share(share: Mapping[str, int]) -> str:
    """Its type, or `SEVERAL`."""
    return next(iter(share)) if len(share) == 1 else SEVERAL


def groups_of(
    problem: AllocationProblem, choice: Mapping[int, Share]
) -> tuple[AllocationProblem, list[Widths]]:
    """The fewest flotillas of a choice, and the problem with the rates that trials have in it."""
    chosen = {number: kind_of_share(share) for number, share in choice.items()}
    there = tuple(_on(c, chosen.get(c.number)) for c in problem.candidates)
    settled = replace(problem, candidates=there, kinds=()) if problem.kinds else problem
    widths = {number: sum(share.values()) for number, share in choice.items()}
    return settled, group_widths(settled, widths)


def _on(candidate: Candidate, kind: str | None) -> Candidate:
    return candidate if kind is None else candidate.as_on(kind)
