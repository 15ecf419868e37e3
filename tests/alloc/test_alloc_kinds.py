"""Fleets of several device types, for allocators that know of one."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optuna_fleet.alloc import (
    SEVERAL,
    ByKind,
    EqualSplitAllocator,
    FleetAllocator,
    GreedyAllocator,
    HomogeneousAllocator,
    SingleDeviceAllocator,
    validate,
)
from optuna_fleet.alloc.kinds import CAUTIOUS
from tests.behaviour.allocation import mixed_problems, placed, problem_of, ruled_problems, trial

PUBLISHED = [
    EqualSplitAllocator(),
    FleetAllocator(),
    GreedyAllocator(),
    HomogeneousAllocator(seed=7),
    SingleDeviceAllocator(),
]


class Recording(GreedyAllocator):
    """Notes what it is asked, by the devices that may be used."""

    def __init__(self):
        super().__init__()
        object.__setattr__(self, "problems", {})

    def allocate(self, problem):
        self.problems[problem.devices] = problem
        return super().allocate(problem)


def asked(problem):
    """What the inner allocator is asked."""
    recording = Recording()
    validate(problem, ByKind(inner=recording).allocate(problem))
    return recording.problems


@settings(max_examples=25)
@given(problem=mixed_problems(), allocator=st.sampled_from(PUBLISHED))
def test_whoever_flies_stays_on_its_type(problem, allocator):
    plan = ByKind(inner=allocator).allocate(problem)
    validate(problem, plan)
    assert plan.allocator == allocator.name
    for number, a in plan.assignments.items():
        candidate = problem.by_number[number]
        room = problem.num_by_kind.get(problem.kind_now(candidate), 0)
        if (problem.kept_width(candidate) or 0) >= candidate.min_devices <= room:
            assert problem.kind_now(candidate) in (problem.kind_of(a.devices), SEVERAL)


@settings(max_examples=25)
@given(problem=ruled_problems(), allocator=st.sampled_from(PUBLISHED))
def test_with_one_type_the_plan_is_that_of_the_inner_allocator(problem, allocator):
    plan = allocator.allocate(problem)
    assert ByKind(inner=allocator).allocate(problem) == plan
    same = replace(problem, kinds=("a",) * len(problem.nodes))
    typed = ByKind(inner=allocator).allocate(same)
    assert placed(typed) == placed(plan)


def test_trials_that_wait_are_shared_out_by_what_there_is_to_do():
    trials = [trial(n, {"fast": (300.0,), "slow": (100.0,)}) for n in range(10)]
    seen = asked(problem_of(*trials, nodes=((0,), (1, 2)), kinds=("fast", "slow")))
    assert {d: len(p.candidates) for d, p in seen.items()} == {(0,): 6, (1, 2): 4}


def test_each_type_counts_on_its_share_of_the_trials_to_come():
    rates = {"slow": (10.0, 20.0), "fast": (20.0, 40.0)}
    trials = trial(1, rates, devices=(0,)), trial(2, rates, devices=(3,), at="fast")
    nodes = ((0, 1, 2), (3, 4, 5))
    seen = asked(problem_of(*trials, nodes=nodes, kinds=("slow", "fast"), num_to_come=5))
    assert {p.num_to_come for p in seen.values()} == {3}


# -- devices of several types at once -----------------------------------------------------------

A2_B1 = {"nodes": ((0, 1), (2,)), "kinds": ("a", "b")}
A2_B2 = {"nodes": ((0, 1), (2, 3)), "kinds": ("a", "b")}
every_allocator = pytest.mark.parametrize("allocator", PUBLISHED, ids=lambda a: a.name)


def spanning(number, *, at="a", **more):
    """It scales perfectly, and on a mixture as half of it would on each type."""
    by_kind = {"a": 20.0, "b": 10.0, SEVERAL: 15.0}
    rates = {kind: [r * m for m in (1, 2, 3, 4)] for kind, r in by_kind.items()}
    return trial(number, rates, at=at, **more)


def devices_of(allocator, problem):
    plan = ByKind(inner=allocator).allocate(problem)
    validate(problem, plan)
    return placed(plan)


@every_allocator
def test_who_lost_a_device_of_its_mixture_gets_as_many_as_it_needs(allocator):
    lost = spanning(1, at=SEVERAL, devices=(1, 2, 9), min_devices=3, movable=False)
    assert len(devices_of(allocator, problem_of(lost, **A2_B2))[1]) >= 3


@every_allocator
def test_a_mixture_flies_alone_where_nothing_can_be_served(allocator):
    large = spanning(1, min_devices=3)
    problem = problem_of(large, **A2_B1, preprocess_samples_per_s=5.0)
    assert devices_of(allocator, problem) == {1: {0, 1, 2}}


@pytest.mark.parametrize(("capacity", "numbers"), [(95.0, {1, 2, 3}), (65.0, {2, 3})])
def test_a_mixture_waits_if_it_can_not_be_served_beside_those_that_stay(capacity, numbers):
    large = spanning(1, min_devices=4)  # draws 60 samples/s; the others 20 and 10
    stay = [
        spanning(2, at="a", devices=(0,), movable=False),
        spanning(3, at="b", devices=(3,), movable=False),
    ]
    nodes = ((0, 1, 2), (3, 4, 5))
    problem = problem_of(
        large, *stay, nodes=nodes, kinds=("a", "b"), preprocess_samples_per_s=capacity
    )
    assert devices_of(GreedyAllocator(), problem).keys() == numbers


def test_the_fallback_leaves_devices_idle_rather_than_move_who_flies():
    assert devices_of(CAUTIOUS.inner, problem_of(spanning(1, devices=(0, 1)), **A2_B2)) == {
        1: {0, 1}
    }
