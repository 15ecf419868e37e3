"""One device per trial: what sweeps do without FLEET, the yardsticks of its evaluation.

Source: "Counterparts for Comparisons" in FLEET (MLSys 2020), section 6.1.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from optuna_fleet.alloc.assembly import assemble, staying
from optuna_fleet.alloc.problem import AllocationProblem, Plan
from optuna_fleet.alloc.streams import Grouping, Widths, group_widths, serves


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleDeviceAllocator:
    """FLEET's baseline: each trial alone on one device, with preprocessing of its own.

    A free device takes any trial that waits, at random; whoever flies stays, on as many devices
    as it has. A trial that can't fly on one device gets as few as it can. Decide whenever a
    device is free. Where the preprocessors' capacity counts, each trial draws a stream of its own.

    Attributes:
        seed: Draws the order of the trials. Each one's place in it depends on the seed and its
            number only.
    """

    seed: int = 0
    name: str = field(default="baseline", init=False)

    def allocate(self, problem: AllocationProblem) -> Plan:
        """Solves ``problem``; see :class:`Allocator`. Never fails."""
        return _planned(self, problem, _alone)


@dataclass(frozen=True, slots=True, kw_only=True)
class HomogeneousAllocator:
    """Pittman et al. (SC 2018): one device per trial, and all share one stream.

    As many trials as there are free devices are picked at random, whoever flies stays; a trial
    that can't fly on one device gets as few as it can. Use it with rounds that end when all of
    their trials have ended, and with ``rate_spread=math.inf``: it knows no bound on rates. With a
    bound, or phases, it takes as many streams as those need.
    """

    seed: int = 0
    name: str = field(default="homogeneous", init=False)

    def allocate(self, problem: AllocationProblem) -> Plan:
        """Solves ``problem``; see :class:`Allocator`. Never fails."""
        return _planned(self, problem, group_widths)


def _planned(
    allocator: SingleDeviceAllocator | HomogeneousAllocator,
    problem: AllocationProblem,
    grouping: Grouping,
) -> Plan:
    widths = staying(problem, grouping=grouping)
    is_served = serves(problem, grouping=grouping)
    free = problem.num_devices - sum(widths.values())
    waiting = [c for t, c in problem.by_number.items() if t not in widths]
    for candidate in sorted(waiting, key=lambda c: _place_in_order(allocator.seed, c.number)):
        m = candidate.min_devices
        if m <= free and is_served({**widths, candidate.number: m}):
            widths[candidate.number] = m
            free -= m
    groups = grouping(problem, widths)
    return assemble(problem, groups, allocator=allocator.name, status="heuristic")


def _alone(problem: AllocationProblem, widths: Mapping[int, int]) -> list[Widths]:
    return [{number: m} for number, m in sorted(widths.items())]


def _place_in_order(seed: int, number: int) -> tuple[float, int]:
    # A text is hashed whole: neighbouring seeds and numbers give unrelated draws.
    return random.Random(f"{seed}/{number}").random(), number
