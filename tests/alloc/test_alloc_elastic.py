"""The elastic allocator and its yardstick: what its options do, and the numbers of the papers."""

import math

import pytest
from alloc_cases import counts

from optuna_fleet.alloc import ElasticAllocator, EqualSplitAllocator
from optuna_fleet.alloc.lengths import MAX_CORRECTION
from optuna_fleet.exceptions import FleetConfigError
from tests.behaviour.allocation import LINEAR, problem_of, trial

MAKESPAN = ElasticAllocator()


def fleet_of(devices, *trials, **more):
    return problem_of(*trials, nodes=(tuple(range(devices)),), **more)


# -- an objective -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "speed"}, "`objective` is 'speed', but must be one of"),
        ({"forward_looking_s": 0.0}, "`forward_looking_s` is 0.0, but must be a number > 0"),
        ({"forward_looking_s": float("inf")}, "`forward_looking_s` is inf, but must be a number"),
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
