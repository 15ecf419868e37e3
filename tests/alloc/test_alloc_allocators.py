"""What `validate` finds, and the greedy allocator, which every policy falls back to."""

import math
from dataclasses import replace

import pytest
from alloc_cases import counts, slide_problem

from optuna_fleet.alloc import (
    AllocationProblem,
    Assignment,
    Candidate,
    FleetAllocator,
    Flotilla,
    GreedyAllocator,
    Plan,
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


def test_validate_lists_everything_that_is_broken():
    problem = slide_problem()
    plan = FleetAllocator().allocate(problem)
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
    plan = FleetAllocator().allocate(problem)
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
    plan = FleetAllocator().allocate(problem)  # one stream of 105 samples/s
    validate(replace(problem, preprocess_samples_per_s=105.0), plan)
    with pytest.raises(ValueError, match="streams of 105 samples/s exceed the 104"):
        validate(replace(problem, preprocess_samples_per_s=104.0), plan)
    ahead = replace(problem.by_number[4], epochs_done=1)
    unlike = replace(problem, candidates=(*problem.candidates[:3], ahead))
    validate(unlike, plan)
    with pytest.raises(ValueError, match=r"phases \[0, 1\] are in one flotilla"):
        validate(replace(unlike, phases=True), plan)


@pytest.mark.parametrize(
    ("devices", "rate", "message"),
    [
        ((0, 2), 20.0, r"trial 1 has devices of types \['a', 'b'\]"),
        ((0,), 30.0, "trial 1 has rate 30.0, not 10.0"),
        ((2, 3), 20.0, "trial 1 has rate 20.0, not 60.0"),
    ],
)
def test_validate_knows_device_types(devices, rate, message):
    candidate = Candidate(number=1, rates=PAIR["a"], rates_by_kind=PAIR)
    problem = AllocationProblem(candidates=(candidate,), nodes=((0, 1), (2, 3)), kinds=("a", "b"))
    validate(problem, assigned((2, 3), 60.0))
    with pytest.raises(ValueError, match=message):
        validate(problem, assigned(devices, rate))


def assigned(devices, rate):
    a = Assignment(number=1, devices=devices, rate=rate)
    return Plan(flotillas=(Flotilla(assignments=(a,)),), allocator="x", reason="y", status="z")
