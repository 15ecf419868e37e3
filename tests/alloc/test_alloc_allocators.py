"""What every allocator must keep to."""

import math
import re
import time
from contextlib import suppress
from dataclasses import replace

import pytest
from alloc_cases import counts, least_capacity, problems, ruled_problems, slide_problem
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from optuna_fleet.alloc import (
    AllocationFailed,
    AllocationProblem,
    Candidate,
    ElasticAllocator,
    EqualSplitAllocator,
    FleetAllocator,
    GreedyAllocator,
    HomogeneousAllocator,
    MipAllocator,
    SingleDeviceAllocator,
    validate,
)

GAINING = [
    GreedyAllocator(),
    GreedyAllocator(keep_flying=True),
    MipAllocator(),
    MipAllocator(rescale_penalty=0.0),
]
STARTING = [*GAINING, SingleDeviceAllocator(), HomogeneousAllocator(seed=7)]


def epochs_per_s(candidate, m):
    return candidate.rate(m) / candidate.samples_per_epoch


ALLOCATORS = [
    *STARTING,
    FleetAllocator(),
    FleetAllocator(delta=70.0),
    ElasticAllocator(),
    ElasticAllocator(objective="throughput"),
    ElasticAllocator(objective="scaling-efficiency"),
    ElasticAllocator(objective=epochs_per_s),
    EqualSplitAllocator(),
    EqualSplitAllocator(published=True),
]
every_allocator = pytest.mark.parametrize(
    "allocator", ALLOCATORS, ids=lambda allocator: re.sub(" at 0x[0-9a-f]+", "", repr(allocator))
)
every_starting_allocator = pytest.mark.parametrize("allocator", STARTING, ids=repr)
every_gaining_allocator = pytest.mark.parametrize("allocator", GAINING, ids=repr)


@every_allocator
@settings(max_examples=30)
@given(problem=ruled_problems())
def test_plans_can_be_flown_and_say_why(allocator, problem):
    plan = allocator.allocate(problem)
    assert_rules_seen_without_validate(problem, plan)
    validate(problem, plan)
    assert plan.allocator == allocator.name
    assert plan.reason
    assert plan.status


def assert_rules_seen_without_validate(problem, plan):
    everything = [a for f in plan.flotillas for a in f.assignments]
    used = [d for a in everything for d in a.devices]
    assert len(set(used)) == len(used) <= problem.num_devices
    assert len(plan.assignments) == len(everything)
    for c in problem.candidates:
        if not c.movable and set(c.devices) <= set(problem.devices):
            assert plan.assignments[c.number].devices == c.devices
    drawn = sum(max(a.rate for a in f.assignments) for f in plan.flotillas)
    stay = set(plan.assignments) <= set(problem.pinned)
    assert stay or drawn <= least_capacity(problem) * (1 + 1e-6)


@every_allocator
@settings(max_examples=20)
@given(problem=ruled_problems(pinning=False))
def test_something_flies_whatever_the_preprocessors_can_do(allocator, problem):
    assume(any(c.min_devices <= problem.num_devices for c in problem.candidates))
    assert allocator.allocate(problem).flotillas


@every_starting_allocator
@settings(max_examples=40)
@given(problem=problems())
def test_no_device_idles_while_a_trial_could_start_on_it(allocator, problem):
    plan = allocator.allocate(problem)
    idle = problem.num_devices - sum(counts(plan).values())
    waiting = [c for c in problem.candidates if c.number not in plan.assignments]
    assert all(c.min_devices > idle for c in waiting)


@every_gaining_allocator
@settings(max_examples=40)
@given(problem=problems())
def test_no_device_idles_while_a_starting_trial_gains_from_it(allocator, problem):
    plan = allocator.allocate(problem)
    idle = problem.num_devices - sum(counts(plan).values())
    for flotilla in plan.flotillas:
        for a in flotilla.assignments:
            candidate = problem.by_number[a.number]
            others = [b.rate for b in flotilla.assignments if b.number != a.number]
            for m in candidate.useful_widths(len(a.devices) + idle):
                rates = [*others, candidate.rate(m)]
                fits = max(rates) <= min(rates) * problem.rate_spread
                assert candidate.devices or not fits or candidate.rate(m) <= a.rate


@every_allocator
@settings(max_examples=15)
@given(problem=ruled_problems(), order=st.randoms())
def test_plans_do_not_depend_on_the_order_of_candidates(allocator, problem, order):
    shuffled = list(problem.candidates)
    order.shuffle(shuffled)
    again = allocator.allocate(replace(problem, candidates=tuple(shuffled)))
    assert again == allocator.allocate(problem)


@every_allocator
@pytest.mark.parametrize("capacity", [None, 700.0])
def test_the_time_limit_is_kept(allocator, capacity):
    candidates = tuple(
        Candidate(
            number=n,
            rates=tuple((20.0 + 3.7 * n) * m**0.9 for m in range(1, 13)),
            epochs_done=n % 5,
        )
        for n in range(50)
    )
    nodes = tuple(tuple(range(n, n + 4)) for n in range(0, 32, 4))
    problem = AllocationProblem(
        candidates=candidates,
        nodes=nodes,
        time_limit_s=0.5,
        phases=True,
        preprocess_samples_per_s=capacity,
    )
    started = time.process_time()  # on a busy machine others may take any time
    with suppress(AllocationFailed):
        validate(problem, allocator.allocate(problem))
    assert time.process_time() - started < 0.5 + 3


@every_allocator
def test_a_fleet_with_an_idle_trial_but_no_device_says_so(allocator):
    plan = allocator.allocate(replace(slide_problem(), nodes=((), ())))
    assert plan.flotillas == ()
    assert "trial 1 waits: it needs 1 devices, there are 0" in plan.reason


@every_allocator
def test_no_candidates_is_a_plan_too(allocator):
    assert allocator.allocate(replace(slide_problem(), candidates=())).flotillas == ()


def test_greedy_forms_the_flotilla_of_fleets_slides():
    plan = GreedyAllocator().allocate(slide_problem())
    assert counts(plan) == {1: 1, 4: 3}
    assert len(plan.flotillas) == 1
    assert plan.flotillas[0].reference_rate == 100
    assert plan.reason.startswith("2 of 4 trials on 4 of 4 devices at 100..105 samples/s")


def test_greedy_speeds_up_the_slowest_but_not_past_its_peak():
    candidate = Candidate(number=0, rates=(50.0, 80.0, 90.0, 70.0))
    problem = AllocationProblem(candidates=(candidate,), nodes=((0, 1, 2, 3),))
    assert counts(GreedyAllocator().allocate(problem)) == {0: 3}


def test_greedy_keep_flying_starts_the_waiting_before_it_rescales_anyone():
    flying = Candidate(number=1, rates=(100.0, 190.0, 270.0), devices=(0,))
    waiting = Candidate(number=2, rates=(90.0,))
    problem = AllocationProblem(candidates=(flying, waiting), nodes=((0, 1),))
    assert counts(GreedyAllocator(keep_flying=True).allocate(problem)) == {1: 1, 2: 1}


def test_greedy_does_not_open_a_stream_that_the_preprocessors_can_not_serve():
    fast, slow = Candidate(number=1, rates=(90.0,)), Candidate(number=2, rates=(20.0, 38.0))
    problem = AllocationProblem(candidates=(fast, slow), nodes=((0, 1, 2),))
    assert counts(GreedyAllocator().allocate(problem)) == {1: 1, 2: 2}
    less = replace(problem, preprocess_samples_per_s=115.0)
    assert counts(GreedyAllocator().allocate(less)) == {1: 1, 2: 1}
    least = replace(problem, preprocess_samples_per_s=30.0)
    plan = GreedyAllocator().allocate(least)
    assert counts(plan) == {2: 1}
    assert "trial 1 waits: the preprocessors can't serve it as well" in plan.reason


def test_a_plan_says_that_preprocessors_slow_it():
    problem = replace(slide_problem(), preprocess_samples_per_s=30.0)
    plan = GreedyAllocator().allocate(problem)
    assert counts(plan) == {4: 1}
    assert "slowed by preprocessors that give 30;" in plan.reason


def test_validate_lists_everything_that_is_broken():
    problem = slide_problem()
    plan = GreedyAllocator().allocate(problem)
    with pytest.raises(ValueError, match=r"trials \[1, 4\] are assigned.*devices .* used more"):
        validate(problem, replace(plan, flotillas=plan.flotillas * 2))
    with pytest.raises(ValueError, match=r"devices \[.*\] are not available"):
        validate(replace(problem, nodes=((0,),)), plan)
    with pytest.raises(ValueError, match="no candidate"):
        validate(replace(problem, candidates=problem.candidates[:2]), plan)
    with pytest.raises(ValueError, match=r"spread by more than 1\.01"):
        validate(replace(problem, rate_spread=1.01), plan)
    validate(replace(problem, rate_spread=math.inf), plan)


def test_validate_knows_what_can_not_move():
    problem = slide_problem()
    plan = GreedyAllocator().allocate(problem)
    devices = plan.assignments[4].devices
    staying = replace(problem.by_number[4], movable=False, devices=devices[::-1])
    elsewhere = replace(staying, devices=tuple({0, 1, 2, 3} - set(devices)))
    absent = replace(elsewhere, number=2)
    lost = replace(elsewhere, devices=(17,))
    for changed, broken in (
        (staying, None),
        (elsewhere, r"trial 4 can't move now"),
        (absent, r"trials \[2\] can't leave"),
        (lost, None),
    ):
        others = [c for c in problem.candidates if c.number != changed.number]
        now = replace(problem, candidates=(*others, changed))
        if broken is None:
            validate(now, plan)
        else:
            with pytest.raises(ValueError, match=broken):
                validate(now, plan)


def test_validate_knows_phases_and_capacity():
    problem = slide_problem()
    plan = GreedyAllocator().allocate(problem)  # one stream of 105 samples/s
    validate(replace(problem, preprocess_samples_per_s=105.0), plan)
    with pytest.raises(ValueError, match="streams of 105 samples/s exceed the 104"):
        validate(replace(problem, preprocess_samples_per_s=104.0), plan)
    ahead = replace(problem.by_number[4], epochs_done=1)
    unlike = replace(problem, candidates=(*problem.candidates[:3], ahead))
    validate(unlike, plan)
    with pytest.raises(ValueError, match=r"phases \[0, 1\] are in one flotilla"):
        validate(replace(unlike, phases=True), plan)


def test_validate_lets_the_slowest_trial_fly_whatever_the_capacity_is():
    problem = replace(slide_problem(), preprocess_samples_per_s=1.0)
    validate(problem, FleetAllocator().allocate(problem))
    hurried = replace(problem, candidates=problem.candidates[:1])
    plan = GreedyAllocator().allocate(hurried)
    assert counts(plan) == {1: 1}
    with pytest.raises(ValueError, match="streams of 100 samples/s exceed the 40"):
        validate(problem, plan)


def test_the_slowest_trial_counts_only_if_it_can_fly():
    wide = Candidate(number=1, rates=(1.0,) * 3, min_devices=3)
    small = Candidate(number=2, rates=(50.0,))
    problem = AllocationProblem(
        candidates=(wide, small), nodes=((0, 1),), preprocess_samples_per_s=10.0
    )
    assert counts(GreedyAllocator().allocate(problem)) == {2: 1}
    assert counts(MipAllocator().allocate(problem)) == {2: 1}


def test_validate_never_blames_a_plan_for_what_can_not_move():
    flying = [
        replace(c, devices=(c.number - 1,), movable=False) for c in slide_problem().candidates[:2]
    ]
    problem = replace(slide_problem(), candidates=tuple(flying), preprocess_samples_per_s=1.0)
    alone = SingleDeviceAllocator().allocate(problem)  # 100 + 80 where one stream would do
    assert len(alone.flotillas) == 2
    validate(problem, alone)
    late = Candidate(number=9, rates=(90.0, 110.0))  # joins the stream at no cost, but no faster
    joined = MipAllocator().allocate(replace(problem, candidates=(*flying, late)))
    assert counts(joined) == {1: 1, 2: 1, 9: 1}
    assert len(joined.flotillas) == 1
