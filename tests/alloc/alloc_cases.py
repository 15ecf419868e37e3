"""Problems for the allocation tests: FLEET's example, the optimum by brute force."""

import itertools
import math

from optuna_fleet.alloc import SEVERAL, AllocationProblem, Candidate
from optuna_fleet.alloc.draft import Draft, share_of
from optuna_fleet.alloc.streams import stream_limit

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


def shares_of(problem, candidate):
    """All that a trial could have: device type -> devices."""
    kinds = list(problem.num_by_kind)
    for numbers in itertools.product(*(range(n + 1) for n in problem.num_by_kind.values())):
        share = {k: m for k, m in zip(kinds, numbers, strict=True) if m}
        may_have = len(share) == 1 or (candidate.spans_types and len(share) > 1)
        if may_have and is_as_it_is(problem, candidate, share):
            yield share


def is_as_it_is(problem, candidate, share):
    """Whether a mixture of as many devices as it has is the one that it has."""
    own = share_of(problem, candidate.devices)
    as_many = len(own) > 1 and len(share) > 1 and sum(share.values()) == len(candidate.devices)
    return not as_many or all(share.get(k, 0) >= own[k] for k in own.keys() & problem.num_by_kind)


def kind_and_width(share):
    kind, *others = share
    return SEVERAL if others else kind, sum(share.values())


def best_choice(problem, gains, flotilla_cost):
    """The largest worth of all choices that can be flown; tries them all.

    Args:
        problem: Of few trials and devices.
        gains: (trial, type, devices) -> worth of what can be chosen.
        flotilla_cost: Of each flotilla.
    """
    pinned = Draft(problem).choice
    options = [
        [pinned[t]]
        if t in pinned
        else [{}, *(s for s in shares_of(problem, c) if (t, *kind_and_width(s)) in gains)]
        for t, c in problem.by_number.items()
    ]
    best = -math.inf
    for shares in itertools.product(*options):
        used = [sum(s.get(kind, 0) for s in shares) for kind in problem.num_by_kind]
        if all(m <= n for m, n in zip(used, problem.num_by_kind.values(), strict=True)):
            choice = {t: s for t, s in zip(problem.by_number, shares, strict=True) if s}
            work = work_of(choice, gains, pinned)
            if work > best:
                best = max(best, work - flotilla_cost * fewest(problem, choice))
    return best


def work_of(choice, gains, pinned):
    return sum(gains[(t, *kind_and_width(s))] for t, s in choice.items() if t not in pinned)


def fewest(problem, choice):
    """Fewest flotillas, of all ways to form them, that keep to the rules; infinite if none."""
    by_number, limit = problem.by_number, stream_limit(problem) * (1 + 1e-9)
    rate = {}
    for number, share in choice.items():
        kind, m = kind_and_width(share)
        rate[number] = by_number[number].rates_on(kind)[m - 1]
    found = math.inf
    for groups in partitions(sorted(choice)):
        rates = [[rate[t] for t in group] for group in groups]
        alike = all(len({by_number[t].epochs_done for t in g}) == 1 for g in groups)
        if (
            (alike or not problem.phases)
            and all(max(r) <= min(r) * problem.rate_spread for r in rates)
            and sum(map(max, rates)) <= limit
        ):
            found = min(found, len(groups))
    return found


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
