"""Rounds planned by the model: what a trial, a move and a flotilla are worth."""

from dataclasses import replace

import pytest
from alloc_cases import counts, slide_problem

from optuna_fleet.alloc import AllocationProblem, Candidate, MipAllocator, validate


def many_rates(**more):
    candidates = tuple(
        Candidate(number=n, rates=tuple((10.0 + 3.7 * n) * m**0.9 for m in range(1, 9)))
        for n in range(20)
    )
    nodes = tuple((n, n + 1, n + 2, n + 3) for n in range(0, 24, 4))
    return AllocationProblem(candidates=candidates, nodes=nodes, time_limit_s=20.0, **more)


@pytest.mark.parametrize(("cost", "flying"), [(0.25, 3), (0.05, 4)])
def test_a_further_flotilla_is_opened_only_where_that_pays(cost, flying):
    # FLEET's {1: 1, 4: 3} makes 1 + 105/40 of four devices; three trials with one on two make
    # 3.875.
    plan = MipAllocator(flotilla_cost=cost).allocate(slide_problem())
    assert len(plan.assignments) == flying
    assert len(plan.flotillas) == (1 if flying == 3 else 2)
    assert sum(counts(plan).values()) == 4


@pytest.mark.parametrize(
    ("capacity", "expected"),
    [(60.0, {2: 2, 3: 2, 4: 2}), (187.0, {2: 2, 3: 2, 4: 2}), (189.0, {1: 1})],
)
def test_the_capacity_is_spent_where_it_gives_most_work(capacity, expected):
    # The best of all would be streams of 100, 58 and 30 samples/s.
    fast = Candidate(number=1, rates=(100.0,))
    slow = [Candidate(number=n, rates=(30.0, 58.0)) for n in (2, 3, 4)]
    problem = AllocationProblem(
        candidates=(fast, *slow),
        nodes=((0, 1, 2), (3, 4, 5)),
        rate_spread=1.5,
        preprocess_samples_per_s=capacity,
    )
    plan = MipAllocator(flotilla_cost=0.0).allocate(problem)
    validate(problem, plan)
    assert expected.items() <= counts(plan).items()
    assert sum(counts(plan).values()) == 6


def test_a_second_flotilla_is_not_broken_up_to_widen_the_first():
    fast = [Candidate(number=n, rates=(400.0, 760.0), devices=(n,)) for n in (0, 1)]
    slow = [Candidate(number=n, rates=(10.0, 19.0), devices=(n,)) for n in (2, 3)]
    problem = AllocationProblem(candidates=(*fast, *slow), nodes=((0, 1, 2, 3),))
    plan = MipAllocator().allocate(problem)
    assert {t: a.devices for t, a in plan.assignments.items()} == {n: (n,) for n in range(4)}
    assert "in 2 flotillas at 10 and 400 samples/s" in plan.reason


@pytest.mark.parametrize("rate", [100.0, 5.0])
def test_a_trial_wins_that_was_passed_over_often_enough(rate):
    rivals = [Candidate(number=n, rates=(100.0,), devices=(n,)) for n in (0, 1)]
    for waited, expected in ((0, False), (10, False), (100, True)):
        late = Candidate(number=9, rates=(rate,), waited_rounds=waited)
        problem = AllocationProblem(candidates=(*rivals, late), nodes=((0, 1),))
        assert (9 in MipAllocator().allocate(problem).assignments) is expected


# -- more rates than are tried as those of flotillas ----------------------------------------------


def test_a_capacity_of_which_it_can_not_try_all_rates_is_kept():
    stuck = Candidate(number=90, rates=(17.3,), devices=(0,), movable=False)
    for capacity in (200.0, 17.3, 1.0):
        problem = many_rates(preprocess_samples_per_s=capacity)
        problem = replace(problem, candidates=(*problem.candidates, stuck))
        plan = MipAllocator().allocate(problem)
        validate(problem, plan)
        assert len(plan.assignments) > 1  # at least who is no faster joins
