"""The one model: its optimum, the choice without a solver, and what it does in need."""

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
    MipAllocator,
    model,
    program,
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


@settings(max_examples=80)
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


@settings(max_examples=80)
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


# -- BFTrainer's model, as published --------------------------------------------------------------


# -- in need --------------------------------------------------------------------------------------


def test_an_answer_that_is_worse_than_the_choice_without_a_solver_is_not_taken(monkeypatch):
    found = Decision(choice={4: {"": 2}}, status="feasible", gap=0.5, solver="CBC")
    monkeypatch.setattr(model, "_solve", lambda _: found)
    flying = [replace(c, devices=(c.number,)) for c in slide_problem().candidates]
    problem = replace(slide_problem(), candidates=tuple(flying), nodes=((1, 2, 3, 4),))
    plan = MipAllocator().allocate(problem)
    assert counts(plan) == {1: 1, 2: 1, 3: 1, 4: 1}
    assert (plan.status, plan.gap) == ("feasible", 0.5)
