"""The elastic allocator and its yardstick: what its options do, and the numbers of the papers."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from alloc_cases import counts
from hypothesis import given, settings
from hypothesis import strategies as st

from optuna_fleet.alloc import ElasticAllocator, EqualSplitAllocator, validate
from optuna_fleet.alloc.lengths import MAX_CORRECTION
from optuna_fleet.exceptions import FleetConfigError
from tests.behaviour.allocation import LINEAR, problem_of, problems, trial

MAKESPAN = ElasticAllocator()
THROUGHPUT = ElasticAllocator(objective="throughput")
EFFICIENCY = ElasticAllocator(objective="scaling-efficiency")


def fleet_of(devices, *trials, **more):
    return problem_of(*trials, nodes=(tuple(range(devices)),), **more)


# -- an objective -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "speed"}, "`objective` is 'speed', but must be one of"),
        ({"forward_looking_s": 0.0}, "`forward_looking_s` is 0.0, but must be a number > 0"),
        ({"forward_looking_s": float("nan")}, "`forward_looking_s` is nan, but must be a number"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(FleetConfigError, match=message):
        ElasticAllocator(**options)


def test_an_objective_of_the_users_must_give_numbers():
    allocator = ElasticAllocator(objective=lambda candidate, m: math.nan)
    with pytest.raises(ValueError, match=r"`objective` gives \[nan, nan, nan\] for trial 1"):
        allocator.allocate(fleet_of(3, trial(1)))


def test_an_objective_of_the_users_is_asked_with_the_rates_of_each_type():
    rates = {"a": (10.0, 20.0), "b": (30.0, 40.0)}
    problem = problem_of(trial(1, rates), nodes=((0, 1), (2, 3)), kinds=("a", "b"))
    for objective, rate in ((lambda c, m: c.rate(m), 40.0), (lambda c, m: 1 / c.rate(m), 10.0)):
        plan = ElasticAllocator(objective=objective).allocate(problem)
        assert plan.assignments[1].rate == rate


# -- to be done soon ----------------------------------------------------------------------------


def test_all_aim_to_finish_together_but_those_with_long_epochs_a_little_earlier():
    slow = trial(2, rates=tuple(r / 4 for r in LINEAR))
    widths = [
        counts(ElasticAllocator(hedge=hedge).allocate(fleet_of(8, trial(1), slow)))[2]
        for hedge in (-1.0, 0.0, 0.6)
    ]
    assert widths == [4, 6, 7]


def test_a_wrong_prediction_does_limited_harm():
    def widths(predicted):
        trials = [trial(1, predicted_epochs=predicted), trial(2), trial(3)]
        problem = fleet_of(8, *trials, finished_epochs=(10,) * 8)
        return counts(MAKESPAN.allocate(problem))

    assert MAX_CORRECTION == 2.0
    assert widths(1e9) == widths(20.0) == {1: 4, 2: 2, 3: 2}
    assert widths(0.0) == widths(5.0)
    assert widths(None) == widths(float("nan"))


def test_nobody_gets_the_devices_of_others_while_many_trials_are_to_come():
    lengths = [3.0, 3.0, 1.0, 1.0, 1.0, 1.0]
    trials = [trial(k, devices=(k,), samples_per_epoch=100 * x) for k, x in enumerate(lengths)]
    assert max(counts(MAKESPAN.allocate(fleet_of(6, *trials))).values()) > 1
    for num_to_come in (6, 10**9):
        problem = fleet_of(6, *trials, num_to_come=num_to_come)
        assert counts(MAKESPAN.allocate(problem)) == dict.fromkeys(range(6), 1)


@settings(max_examples=40)
@given(problem=problems(), num_to_come=st.integers(0, 60), within=st.integers(0, 2**16))
def test_nobody_is_left_without_devices_within_an_epoch_or_wide_for_nothing(
    problem, num_to_come, within
):
    trials = [
        replace(c, is_within_epoch=bool(c.devices) and bool(within >> k & 1))
        for k, c in enumerate(problem.candidates)
    ]
    problem = replace(problem, candidates=tuple(trials), num_to_come=num_to_come)
    plan = MAKESPAN.allocate(problem)
    validate(problem, plan)
    for c in trials:
        if c.is_within_epoch and problem.kept_width(c):
            assert c.number in plan.assignments
    for number, a in plan.assignments.items():
        c = problem.by_number[number]
        narrower = c.rates[c.min_devices - 1 : len(a.devices) - 1]
        assert number in problem.pinned or all(r < a.rate for r in narrower)


# -- who moves ----------------------------------------------------------------------------------


@pytest.mark.parametrize("movable", [True, False])
@pytest.mark.parametrize("allocator", [MAKESPAN, THROUGHPUT, EqualSplitAllocator()])
def test_two_trials_that_claim_a_device_do_not_both_get_it(allocator, movable):
    problem = problem_of(
        trial(1, devices=(0, 1)), trial(2, devices=(1, 2), movable=movable), num_to_come=0
    )
    plan = allocator.allocate(problem)
    validate(problem, plan)
    assert sum(counts(plan).values()) == 4
    assert movable or plan.assignments[2].devices == (1, 2)


# -- equal split --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("published", "least", "devices", "expected"),
    [
        (False, 1, 8, {0: 3, 1: 3, 2: 2}),
        (False, 1, 2, {0: 1, 1: 1}),
        (False, 2, 5, {0: 3, 1: 2}),
        (True, 1, 8, {0: 4, 1: 2, 2: 2}),
        (True, 1, 3, {0: 3}),  # nobody has a share above the minimum: the first gets all
    ],
)
def test_equal_split_by_hand(published, least, devices, expected):
    trials = [trial(n, min_devices=least) for n in range(3)]
    allocator = EqualSplitAllocator(published=published)
    assert counts(allocator.allocate(fleet_of(devices, *trials))) == expected


# -- BFTrainer's Table 2 -------------------------------------------------------------------------

TABLE_2 = {  # 1000 samples/s on 1, 2, 4, ..., 64 nodes
    "AlexNet": (7.1, 13.1, 21.1, 40.5, 74.0, 130.8, 202.1),
    "ResNet18": (5.2, 10.6, 20.4, 39.6, 78.0, 144.8, 262.7),
    "DenseNet": (1.0, 2.0, 3.8, 7.6, 15.0, 28.8, 57.8),
}


def table_2_problem(num_nodes):
    widths = [2**k for k in range(7)]
    tables = [np.interp(range(1, 65), widths, table) for table in TABLE_2.values()]
    return fleet_of(num_nodes, *(trial(n, table.tolist()) for n, table in enumerate(tables)))


@pytest.mark.parametrize("num_nodes", [3, 20, 64, 100])
@pytest.mark.parametrize("allocator", [THROUGHPUT, EFFICIENCY])
def test_table_2_is_shared_out_as_well_as_can_be(allocator, num_nodes):
    problem = table_2_problem(num_nodes)
    first, second, third = (
        np.array([0.0, *c.rates]) / (1.0 if allocator is THROUGHPUT else c.rates[0])
        for c in problem.candidates
    )
    best = max(
        first[a] + second[b] + third[min(64, num_nodes - a - b)]
        for a, b in product(range(65), range(65))
        if a + b <= num_nodes
    )
    got = counts(allocator.allocate(problem))
    worth = first[got.get(0, 0)] + second[got.get(1, 0)] + third[got.get(2, 0)]
    assert worth == pytest.approx(best, rel=2e-4)
