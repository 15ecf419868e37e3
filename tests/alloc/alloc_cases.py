"""Problems for the allocation tests: FLEET's example, the optimum by brute force."""

import itertools
import math

from optuna_fleet.alloc import AllocationProblem, Candidate, MipAllocator
from tests.behaviour.allocation import problems, ruled_problems

__all__ = ["problems", "ruled_problems"]

SLIDE_RATES = {  # FLEET's slides 27-30
    1: (100.0, 190.0, 270.0, 350.0),
    2: (80.0, 150.0, 220.0, 280.0),
    3: (80.0, 150.0, 200.0, 240.0),
    4: (40.0, 75.0, 105.0, 120.0),
}


def slide_problem(**changes):
    candidates = tuple(Candidate(number=n, rates=r) for n, r in SLIDE_RATES.items())
    return AllocationProblem(candidates=candidates, nodes=((0, 1), (2, 3)), **changes)


def counts(plan):
    return {number: len(a.devices) for number, a in plan.assignments.items()}


def best_objective(problem):
    """The largest objective of all admissible plans; tries them all."""
    allocator = MipAllocator()
    values = allocator.values(problem)
    options = {c.number: [0] for c in problem.candidates}
    for number, m in values:
        options[number].append(m)
    for number, m in problem.pinned.items():
        options[number] = [m]
    best = 0.0 if not problem.pinned else -math.inf
    for widths in itertools.product(*options.values()):
        flying = {t: m for t, m in zip(options, widths, strict=True) if m}
        work = sum(values[option] for option in flying.items())
        if sum(widths) <= problem.num_devices and work > best:
            best = max(best, work - allocator.flotilla_cost * fewest(problem, flying))
    return best


def fewest(problem, widths):
    """Fewest flotillas, of all ways to form them, that keep to the rules; infinite if none."""
    numbers = sorted(widths)
    rate = {t: problem.by_number[t].rate(m) for t, m in widths.items()}
    found = math.inf
    for groups in partitions(numbers):
        rates = [[rate[t] for t in group] for group in groups]
        alike = all(len({problem.by_number[t].epochs_done for t in g}) == 1 for g in groups)
        if (
            (alike or not problem.phases)
            and all(max(r) <= min(r) * problem.rate_spread for r in rates)
            and sum(map(max, rates)) <= least_capacity(problem) * (1 + 1e-9)
        ):
            found = min(found, len(groups))
    return found


def least_capacity(problem):
    """The preprocessors' capacity or, if more, what can't be avoided."""
    capacity = problem.preprocess_samples_per_s
    if capacity is None:
        return math.inf
    if pinned := problem.pinned:
        rates = {t: problem.by_number[t].rate(m) for t, m in pinned.items()}
        ways = [
            sum(max(rates[t] for t in g) for g in groups)
            for groups in partitions(sorted(pinned))
            if all(
                max(rates[t] for t in g) <= min(rates[t] for t in g) * problem.rate_spread
                and len({problem.by_number[t].epochs_done for t in g}) == 1
                for g in groups
            )
        ]
        return max(capacity, min(ways))
    fitting = [c for c in problem.candidates if c.min_devices <= problem.num_devices]
    return max([capacity, *[min(c.rate(c.min_devices) for c in fitting)] * bool(fitting)])


def partitions(items):
    """All ways to split ``items`` into groups."""
    if not items:
        yield []
        return
    first, *rest = items
    for groups in partitions(rest):
        yield [[first], *groups]
        for k, group in enumerate(groups):
            yield [*groups[:k], [first, *group], *groups[k + 1 :]]
