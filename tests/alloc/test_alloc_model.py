"""The one model: its optimum, the choice without a solver, what it does in need, and in rounds."""

import math
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from alloc_cases import best_choice, counts, fewest, slide_problem, work_of
from hypothesis import given, settings
from hypothesis import strategies as st

from optuna_fleet.alloc import (
    SEVERAL,
    AllocationProblem,
    Candidate,
    MipAllocator,
    model,
    program,
    validate,
)
from optuna_fleet.alloc.draft import Draft
from optuna_fleet.alloc.model import Decision, decide
from optuna_fleet.alloc.program import Program, by_slope
from tests.behaviour.allocation import mixed_problems

# -- the optimum by brute force -------------------------------------------------------------------


@st.composite
def worths(draw):
    """A worth that heeds no rates: falling, negative, with ties, or ever more."""
    by_option = random.Random(draw(st.integers(0, 2**32)))
    table = {}
    grows = draw(st.booleans())
    for key in ((t, kind) for t in range(41) for kind in ("", *"abc", SEVERAL)):
        gains = np.array([by_option.randint(-5, 40) / 3 for _ in range(10)])
        table[key] = gains.cumsum() if grows else gains
    return lambda candidate, kind: (
        (m, float(table[candidate.number, kind][m - 1]))
        for m in range(candidate.min_devices, candidate.widest + 1)
    )


small_problems = mixed_problems(max_candidates=4, max_devices=6)
some_cost = st.sampled_from([0.0, 0.3, 5.0])


@settings(max_examples=50)
@given(problem=small_problems, worth=worths(), cost=some_cost)
def test_no_choice_that_can_be_flown_is_worth_more_with_or_without_pruning(problem, worth, cost):
    made = Program.of(problem, worth, cost)
    best = best_choice(problem, made.gains, made.flotilla_cost)
    for many in (10**6, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(program, "_MANY", many)
            patch.setattr(model, "MOST_FLOTILLAS", 1000)  # all there are
            decision = decide(problem, worth, flotilla_cost=cost)
        if made.options:
            assert value_of(problem, made, decision.choice) == pytest.approx(
                best, rel=2 * model._RELATIVE_GAP
            )
        assert decision.status == ("optimal" if made.options else "trivial")


@settings(max_examples=50)
@given(problem=small_problems, worth=worths(), cost=some_cost)
def test_the_choice_without_a_solver_can_be_flown_and_is_worth_no_more(problem, worth, cost):
    made = Program.of(problem, worth, cost)
    choice, _ = by_slope(made)
    used = Counter()
    for number, share in choice.items():
        used.update(share)
        fits = problem.by_number[number].min_devices <= sum(share.values())
        assert fits or number in problem.pinned
    assert all(m <= problem.num_by_kind[kind] for kind, m in used.items())
    assert Draft(problem).choice.items() <= choice.items()
    assert fewest(problem, choice) < math.inf or choice.keys() == problem.pinned.keys()
    best = best_choice(problem, made.gains, made.flotilla_cost)
    assert made.value(choice) <= best + 1e-9 * abs(best) or not made.options


def value_of(problem, made, choice):
    """As `Program.value`, but with flotillas formed in all ways there are."""
    work = work_of(choice, made.gains, made.fixed)
    return work - made.flotilla_cost * fewest(problem, choice)


# -- in need --------------------------------------------------------------------------------------


def test_an_answer_that_is_worse_than_the_choice_without_a_solver_is_not_taken(monkeypatch):
    found = Decision(choice={4: {"": 2}}, status="feasible", gap=0.5, solver="CBC")
    monkeypatch.setattr(model, "_solve", lambda _: found)
    flying = [replace(c, devices=(c.number,)) for c in slide_problem().candidates]
    problem = replace(slide_problem(), candidates=tuple(flying), nodes=((1, 2, 3, 4),))
    plan = MipAllocator().allocate(problem)
    assert counts(plan) == {1: 1, 2: 1, 3: 1, 4: 1}
    assert (plan.status, plan.gap) == ("feasible", 0.5)


# -- rounds: what a trial, a move and a flotilla are worth ----------------------------------------


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


def test_a_capacity_of_which_it_can_not_try_all_rates_is_kept():
    stuck = Candidate(number=90, rates=(17.3,), devices=(0,), movable=False)
    for capacity in (200.0, 17.3, 1.0):
        problem = many_rates(preprocess_samples_per_s=capacity)
        problem = replace(problem, candidates=(*problem.candidates, stuck))
        plan = MipAllocator().allocate(problem)
        validate(problem, plan)
        assert len(plan.assignments) > 1  # at least who is no faster joins
