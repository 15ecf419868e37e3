"""Problems for the allocation tests: FLEET's example, strategies, the optimum by brute force."""

import itertools
import math
from dataclasses import replace

from hypothesis import strategies as st

from optuna_fleet.alloc import AllocationProblem, Candidate, MipAllocator, RateProfile

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


@st.composite
def nodes_strategy(draw, max_devices):
    sizes = draw(st.lists(st.sampled_from([4, 3, 2, 1, 0]), min_size=2, max_size=4))
    total = min(sum(sizes), max_devices)
    indices = iter(draw(st.permutations(range(total + 3)))[:total])
    return tuple(tuple(itertools.islice(indices, size)) for size in sizes)


@st.composite
def rate_curves(draw, max_devices):
    if draw(st.booleans()):  # anything goes
        rates = draw(st.lists(st.integers(10, 400), min_size=1, max_size=max_devices))
        return tuple(map(float, rates))
    profile = RateProfile(structure="s", measured={1: float(draw(st.integers(10, 400)))})
    return profile.rates(max_devices, draw(st.floats(0.7, 1.0)))


@st.composite
def problems(draw, max_candidates=6, max_devices=10, pinning=True):
    nodes = draw(nodes_strategy(max_devices))
    free = [device for node in nodes for device in node]
    candidates = []
    for number in draw(
        st.lists(st.integers(0, 40), min_size=2, max_size=max_candidates, unique=True)
    ):
        rates = draw(rate_curves(max_devices))
        min_devices = draw(st.integers(1, min(2, len(rates))))
        flying = draw(st.integers(0, min(3, len(rates), len(free))))
        flying = flying if flying >= min_devices else 0
        candidates.append(
            Candidate(
                number=number,
                rates=rates,
                devices=tuple(free.pop() for _ in range(flying)),
                min_devices=min_devices,
                max_devices=draw(st.none() | st.integers(max(min_devices, flying), 8)),
                waited_rounds=draw(st.integers(0, 3)),
                epochs_done=draw(st.integers(0, 2)),
                movable=not (pinning and flying and draw(st.booleans())),
            )
        )
    spread = draw(st.sampled_from([1.0, 1.3, 2.0, 8.0, math.inf]))
    return AllocationProblem(
        candidates=tuple(candidates), nodes=nodes, rate_spread=spread, time_limit_s=20.0
    )


@st.composite
def ruled_problems(draw, **limits):
    """Problems with phases, a capacity that binds or is too small, and lost devices."""
    problem = draw(problems(**limits))
    lost = draw(st.sets(st.sampled_from(problem.devices), max_size=2)) if problem.devices else ()
    return replace(
        problem,
        nodes=tuple(tuple(d for d in node if d not in lost) for node in problem.nodes),
        phases=draw(st.booleans()),
        preprocess_samples_per_s=draw(st.none() | st.integers(5, 900).map(float)),
    )


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
