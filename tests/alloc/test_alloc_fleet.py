"""Published policies, against the numbers of their papers and a transcription of the algorithm."""

import math
from dataclasses import replace

import pytest
from alloc_cases import counts, slide_problem
from hypothesis import given, settings
from hypothesis import strategies as st

from optuna_fleet.alloc import (
    AllocationProblem,
    Candidate,
    FleetAllocator,
    HomogeneousAllocator,
    RateProfile,
    SingleDeviceAllocator,
    validate,
)


def fleet_score(assignments, nodes):
    """Loss of Eq. 4: the sum over trials of (nodes it uses) / (devices it has)."""
    node_of = {device: n for n, node in enumerate(nodes) for device in node}
    return sum(len({node_of[d] for d in a}) / len(a) for a in assignments.values())


def unbound(candidates, num_devices, **changes):
    nodes = tuple(tuple(range(n, min(n + 4, num_devices))) for n in range(0, num_devices, 4))
    return AllocationProblem(
        candidates=tuple(candidates), nodes=nodes, rate_spread=math.inf, **changes
    )


def create_flotilla(rates, num_devices, delta):
    """Algorithm 2, line by line, with rising branches only and left-overs that must not slow."""
    reference = max(rates, key=lambda i: (rates[i][0], -i))
    r_fast = rates[reference][0]
    flotilla = {reference: 1}
    while len(flotilla) < len(rates):
        best = None
        for i in sorted(rates.keys() - flotilla.keys()):
            peak = rates[i].index(max(rates[i])) + 1
            for m in range(1, min(peak, num_devices - sum(flotilla.values())) + 1):
                distance = abs(rates[i][m - 1] - r_fast)
                if distance <= delta and (best is None or (distance, m, i) < best):
                    best = distance, m, i
        if best is None:
            break
        flotilla[best[2]] = best[1]
    while sum(flotilla.values()) < num_devices:
        slow = min(flotilla, key=lambda i: (rates[i][flotilla[i] - 1], i))
        m = flotilla[slow]
        if m == len(rates[slow]) or rates[slow][m] <= rates[slow][m - 1]:
            break
        flotilla[slow] += 1
    return flotilla


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.integers(21, 176), st.floats(0.7, 1.0)), min_size=1, max_size=12),
    st.integers(1, 24),
    st.sampled_from([0.0, 20.0, 60.0]),
)
def test_fleet_is_algorithm_2(trials, num_devices, delta):
    rates = {
        n: RateProfile(structure="s", measured={1: float(r)}).rates(num_devices, scaling)
        for n, (r, scaling) in enumerate(trials)
    }
    problem = unbound((Candidate(number=n, rates=r) for n, r in rates.items()), num_devices)
    plan = FleetAllocator(delta=delta).allocate(problem)
    validate(problem, plan)
    assert counts(plan) == create_flotilla(rates, num_devices, delta)
    assert len(plan.flotillas) == 1


def test_the_placement_of_the_slides_and_of_figure_3():
    # Slide 31: DNN 4 takes one whole node and shares the other with DNN 1.
    plan = FleetAllocator().allocate(replace(slide_problem(), rate_spread=math.inf))
    placed = {t: a.devices for t, a in plan.assignments.items()}
    assert fleet_score(placed, slide_problem().nodes) == pytest.approx(1 / 1 + 2 / 3)
    # Figure 3: groups of 1, 2, 1 and 4 trainers, each on as few nodes as can be.
    wanted = {1: 1, 2: 2, 3: 1, 4: 4}
    rates = {t: tuple(100.0 * k / m for k in range(1, m + 1)) for t, m in wanted.items()}
    problem = unbound((Candidate(number=t, rates=r) for t, r in rates.items()), 8)
    plan = FleetAllocator(delta=0.0).allocate(problem)
    assert counts(plan) == wanted
    placed = {t: a.devices for t, a in plan.assignments.items()}
    assert fleet_score(placed, problem.nodes) == 1 + 1 / 2 + 1 + 1 / 4


def test_fleet_keeps_to_a_finite_spread_to_phases_and_to_the_capacity():
    ahead = replace(slide_problem().by_number[4], epochs_done=1)
    problem = replace(slide_problem(), candidates=(*slide_problem().candidates[:3], ahead))
    assert 4 in counts(FleetAllocator().allocate(problem))
    for rule in ({"rate_spread": 1.04}, {"phases": True}, {"preprocess_samples_per_s": 104.0}):
        ruled = replace(problem, **rule)
        plan = FleetAllocator().allocate(ruled)
        validate(ruled, plan)
        assert 1 in plan.assignments
        assert 4 not in plan.assignments


def test_the_baseline_pays_for_a_stream_per_trial_and_the_shared_one_does_not():
    everyone = [Candidate(number=n, rates=(50.0,)) for n in range(8)]
    problem = unbound(everyone, 4, preprocess_samples_per_s=110.0)
    assert len(counts(SingleDeviceAllocator().allocate(problem))) == 2
    assert len(counts(HomogeneousAllocator().allocate(problem))) == 4
