"""Problems for the allocation tests: FLEET's example, strategies, the optimum by brute force."""

import itertools

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
def problems(draw, max_candidates=6, max_devices=10):
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
            )
        )
    spread = draw(st.sampled_from([1.0, 1.3, 2.0, 8.0]))
    return AllocationProblem(
        candidates=tuple(candidates), nodes=nodes, rate_spread=spread, time_limit_s=20.0
    )


def best_objective(problem, allocator=None):
    """The largest objective of all admissible widths; tries them all."""
    allocator = allocator or MipAllocator()
    options = {c.number: [0] for c in problem.candidates}
    for number, m in allocator.values(problem):
        options[number].append(m)
    best = 0.0
    for widths in itertools.product(*options.values()):
        flying = {t: m for t, m in zip(options, widths, strict=True) if m}
        if sum(widths) <= problem.num_devices and fits(problem, flying, allocator):
            best = max(best, allocator.objective(problem, flying))
    return best


def fits(problem, widths, allocator):
    if allocator.max_flotillas is None or not widths:
        return True
    assert allocator.max_flotillas == 1
    rates = [problem.by_number[t].rate(m) for t, m in widths.items()]
    return max(rates) <= min(rates) * problem.rate_spread
