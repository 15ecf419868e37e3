"""The one model: its optimum, the choice without a solver, and what it does in need."""

import math
import random
import time
from collections import Counter
from dataclasses import replace

import mip
import numpy as np
import pytest
from alloc_cases import best_choice, counts, fewest, slide_problem, work_of
from bftrainer_model import Trainer, published_optimum
from hypothesis import given, settings
from hypothesis import strategies as st

from optuna_fleet.alloc import (
    SEVERAL,
    AllocationProblem,
    Candidate,
    ElasticAllocator,
    MipAllocator,
    model,
    program,
    validate,
)
from optuna_fleet.alloc.draft import Draft, share_of
from optuna_fleet.alloc.model import Decision, decide
from optuna_fleet.alloc.program import Program, by_slope
from tests.behaviour.allocation import mixed_problems, problem_of, trial

THROUGHPUT = ElasticAllocator(objective="throughput")


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


def random_trainers(rng, num_nodes):
    owner = rng.integers(-1, 3, num_nodes)
    trainers = []
    for j in range(3):
        nodes = frozenset(np.flatnonzero(owner == j).tolist())
        points = sorted({0, num_nodes, *rng.integers(1, num_nodes, 2).tolist()})
        rates = [0.0, *np.sort(rng.uniform(1, 100, len(points) - 1)).tolist()]
        trainers.append(
            Trainer(
                table=dict(zip(points, rates, strict=True)),
                smallest=int(rng.integers(1, 3)) if len(nodes) > 1 else 1,
                largest=int(rng.integers(max(2, len(nodes)), num_nodes + 1)),
                up_s=float(rng.uniform(17, 19)),
                down_s=float(rng.uniform(11, 13)),
                nodes=nodes,
            )
        )
    return trainers


def problem_of_trainers(trainers, num_nodes):
    candidates = tuple(
        Candidate(
            number=n,
            rates=tuple(t.rate(m) for m in range(1, num_nodes + 1)),
            devices=tuple(t.nodes),
            min_devices=t.smallest,
            max_devices=t.largest,
            rescale_up_s=t.up_s,
            rescale_down_s=t.down_s,
        )
        for n, t in enumerate(trainers)
    )
    return problem_of(*candidates, nodes=tuple((n,) for n in range(num_nodes)))


@pytest.mark.parametrize("seed", range(12))
def test_throughput_reaches_the_optimum_of_the_published_model(seed):
    rng = np.random.default_rng(seed)
    num_nodes = int(rng.integers(4, 8))
    trainers = random_trainers(rng, num_nodes)
    forward_s = float(rng.choice([10.0, 30.0, 120.0]))
    best, _ = published_optimum(trainers, num_nodes, forward_s, big_m=2 * num_nodes + 2)
    allocator = ElasticAllocator(objective="throughput", forward_looking_s=forward_s)
    widths = counts(allocator.allocate(problem_of_trainers(trainers, num_nodes)))
    reached = sum(t.values(forward_s)[0, widths.get(n, 0)] for n, t in enumerate(trainers))
    assert reached == pytest.approx(best, rel=2 * model._RELATIVE_GAP)


# -- in need --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["NO_SOLUTION_FOUND", "INFEASIBLE", "ERROR", None])
def test_without_an_answer_the_choice_without_a_solver_serves(monkeypatch, ending):
    def optimize(model, **options):
        if ending is None:
            raise mip.InterfacingError("gone")
        return mip.OptimizationStatus[ending]

    monkeypatch.setattr(mip.Model, "optimize", optimize)
    told = f"ended with {ending} after 1 s" if ending else "failed: InterfacingError: gone"
    for allocator in (MipAllocator(), THROUGHPUT, ElasticAllocator()):
        plan = allocator.allocate(slide_problem())
        validate(slide_problem(), plan)
        assert sum(counts(plan).values()) == 4
        assert plan.status.startswith(f"fallback: the solver {told}")
        assert (plan.gap, plan.solver) == (None, "")


def test_an_answer_that_is_worse_than_the_choice_without_a_solver_is_not_taken(monkeypatch):
    found = Decision(choice={4: {"": 2}}, status="feasible", gap=0.5, solver="CBC")
    monkeypatch.setattr(model, "_solve", lambda _: found)
    flying = [replace(c, devices=(c.number,)) for c in slide_problem().candidates]
    problem = replace(slide_problem(), candidates=tuple(flying), nodes=((1, 2, 3, 4),))
    plan = MipAllocator().allocate(problem)
    assert counts(plan) == {1: 1, 2: 1, 3: 1, 4: 1}
    assert (plan.status, plan.gap) == ("feasible", 0.5)


def test_a_solver_that_is_out_of_time_says_so_and_how_far_it_may_be_from_the_optimum(monkeypatch):
    # CBC needs minutes: odd numbers of devices of three types for trials that need even ones, all
    # worth nearly the same per device.
    monkeypatch.setattr(model, "_has_highs", lambda: False)
    draw = random.Random(0)
    needed = [2 * draw.randint(1, 6) for _ in range(60)]
    rates = [
        {kind: [10.0 * k + draw.random() for k in range(1, 13)] for kind in "abc"} for _ in needed
    ]
    trials = [trial(n, rates[n], min_devices=m, max_devices=m) for n, m in enumerate(needed)]
    nodes = tuple(tuple(range(k, k + 31)) for k in (0, 31, 62))
    problem = problem_of(*trials, nodes=nodes, kinds=tuple("abc"), time_limit_s=1.0)
    started = time.process_time()  # on a busy machine others may take any time
    plan = THROUGHPUT.allocate(problem)
    assert time.process_time() - started < 1 + 3
    validate(problem, plan)
    assert (plan.status, plan.solver) == ("feasible", "CBC")
    assert 0 < plan.gap < 0.05
    made = Program.of(problem, THROUGHPUT.worth(problem), 0.0)
    choice = {n: share_of(problem, a.devices) for n, a in plan.assignments.items()}
    assert made.value(choice) >= made.value(by_slope(made)[0])


def large_problem(num_trials, num_devices):
    """Of three device types."""
    rates = [
        {
            kind: tuple((100.0 * speed + n) * m**0.9 for m in range(1, num_devices // 3))
            for kind, speed in zip("abc", (2, 3, 4), strict=True)
        }
        for n in range(num_trials)
    ]
    nodes = tuple(tuple(range(k, k + 4)) for k in range(0, num_devices, 4))
    kinds = tuple("abc"[k % 3] for k in range(len(nodes)))
    trials = [trial(n, of) for n, of in enumerate(rates)]
    return AllocationProblem(
        candidates=tuple(trials), nodes=nodes, kinds=kinds, rate_spread=math.inf
    )


@pytest.mark.parametrize("fails", [False, True])
def test_large_fleets_are_used_with_a_solver_and_without(monkeypatch, fails):
    if fails:
        monkeypatch.setattr(mip.Model, "optimize", None)
    for num_trials, num_devices in ((20, 900), (100, 120)):
        problem = large_problem(num_trials, num_devices)
        plan = THROUGHPUT.allocate(problem)
        validate(problem, plan)
        assert sum(counts(plan).values()) >= 0.98 * num_devices  # all, but for want of time
        assert plan.status.startswith("fallback") or not fails
