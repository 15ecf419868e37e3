"""What `validate` finds; the greedy allocator, which policies fall back to; published ones."""

import math
from dataclasses import replace

import pytest
from alloc_cases import counts, slide_problem
from hypothesis import given, settings
from hypothesis import strategies as st

from optuna_fleet.alloc import (
    AllocationProblem,
    Assignment,
    Candidate,
    FleetAllocator,
    Flotilla,
    GreedyAllocator,
    HomogeneousAllocator,
    Plan,
    RateProfile,
    SingleDeviceAllocator,
    validate,
)

PAIR = {"a": (10.0, 20.0), "b": (30.0, 60.0)}


def test_greedy_speeds_up_the_slowest_but_not_past_its_peak():
    candidate = Candidate(number=0, rates=(50.0, 80.0, 90.0, 70.0))
    problem = AllocationProblem(candidates=(candidate,), nodes=((0, 1, 2, 3),))
    assert counts(GreedyAllocator().allocate(problem)) == {0: 3}


def test_a_plan_says_that_preprocessors_slow_it():
    problem = replace(slide_problem(), preprocess_samples_per_s=30.0)
    plan = GreedyAllocator().allocate(problem)
    assert counts(plan) == {4: 1}
    assert "slowed by preprocessors that give 30;" in plan.reason


# -- validate -----------------------------------------------------------------------------------


SLIDES = slide_problem()
FLOWN = FleetAllocator().allocate(SLIDES)
"""One stream of 105 samples/s."""
TWO_TYPES = AllocationProblem(
    candidates=(Candidate(number=1, rates=PAIR["a"], rates_by_kind=PAIR),),
    nodes=((0, 1), (2, 3)),
    kinds=("a", "b"),
)


def with_4(**changes):
    """The problem with another trial 4, which may have another number then."""
    others = [c for c in SLIDES.candidates if c.number != changes.get("number", 4)]
    others = [c for c in others if c.number != 4 or "number" in changes]
    changed = replace(SLIDES.by_number[4], **changes)
    return replace(SLIDES, candidates=(*others, changed))


OWN = FLOWN.assignments[4].devices
OTHERS = tuple({0, 1, 2, 3} - set(OWN))


def assigned(devices, rate):
    a = Assignment(number=1, devices=devices, rate=rate)
    return Plan(flotillas=(Flotilla(assignments=(a,)),), allocator="x", reason="y", status="z")


@pytest.mark.parametrize(
    ("problem", "plan", "broken"),
    [
        (SLIDES, replace(FLOWN, flotillas=FLOWN.flotillas * 2), "assigned more.*devices .* used"),
        (replace(SLIDES, nodes=((0,),)), FLOWN, r"devices \[.*\] are not available"),
        (replace(SLIDES, candidates=SLIDES.candidates[:2]), FLOWN, "no candidate"),
        (replace(SLIDES, rate_spread=1.01), FLOWN, "spread by more than"),
        (replace(SLIDES, rate_spread=math.inf), FLOWN, None),
        (with_4(movable=False, devices=OWN[::-1]), FLOWN, None),
        (with_4(movable=False, devices=OTHERS), FLOWN, "trial 4 can't move now"),
        (with_4(movable=False, devices=OTHERS, number=2), FLOWN, r"trials \[2\] can't leave"),
        (with_4(movable=False, devices=(17,)), FLOWN, None),  # it lost what it had
        (replace(SLIDES, preprocess_samples_per_s=105.0), FLOWN, None),
        (replace(SLIDES, preprocess_samples_per_s=104.0), FLOWN, "streams of 105 .* exceed"),
        (with_4(epochs_done=1), FLOWN, None),
        (replace(with_4(epochs_done=1), phases=True), FLOWN, r"phases \[0, 1\] are in one"),
        (TWO_TYPES, assigned((2, 3), 60.0), None),
        (TWO_TYPES, assigned((0, 2), 20.0), "devices of types"),
        (TWO_TYPES, assigned((0,), 30.0), "rate 30.0, not 10.0"),
        (TWO_TYPES, assigned((2, 3), 20.0), "rate 20.0, not 60.0"),
    ],
)
def test_validate_finds_what_is_broken(problem, plan, broken):
    if broken is None:
        validate(problem, plan)
        return
    with pytest.raises(ValueError, match=broken):
        validate(problem, plan)


# -- against the numbers of their papers, and a transcription of the algorithm -------------------


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
