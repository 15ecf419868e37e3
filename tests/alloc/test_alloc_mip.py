"""The exact allocation: its optimum by brute force, phases, capacity, and what it does in need."""

import math
from dataclasses import replace

import mip
import pytest
from alloc_cases import best_objective, counts, problems, ruled_problems, slide_problem
from hypothesis import assume, given, settings

from optuna_fleet.alloc import (
    AllocationFailed,
    AllocationProblem,
    Candidate,
    GreedyAllocator,
    MipAllocator,
    validate,
)
from optuna_fleet.alloc.windows import reference_rates


@settings(max_examples=40)
@given(problem=problems(max_candidates=4, max_devices=8, pinning=False))
def test_mip_finds_the_optimum_and_greedy_never_beats_it(problem):
    # A trial worth less than its flotilla's cost flies on idle devices all the same.
    assume(all(c.rate(c.min_devices) > c.rate(1) / 4 for c in problem.candidates))
    best, allocator = best_objective(problem), MipAllocator()
    plan = allocator.allocate(problem)
    assert allocator.objective(problem, counts(plan)) == pytest.approx(best, abs=1e-5)
    assert plan.status in ("optimal", "trivial")
    greedy = counts(GreedyAllocator().allocate(problem))
    assert allocator.objective(problem, greedy) <= best + 1e-9


@settings(max_examples=60)
@given(problem=ruled_problems(max_candidates=4, max_devices=6))
def test_mip_finds_the_optimum_under_phases_and_capacity(problem):
    # A trial worth less than its flotilla's cost flies on idle devices all the same.
    assume(all(min(c.rates) > c.rate(1) / 4 for c in problem.candidates))
    best, allocator = best_objective(problem), MipAllocator()
    plan = allocator.allocate(problem)
    assert allocator.objective(problem, counts(plan)) == pytest.approx(best, abs=1e-5)
    assert plan.status in ("optimal", "trivial")
    assert GreedyAllocator(keep_flying=True).allocate(problem).status == "heuristic"


def test_mip_puts_unlike_phases_into_unlike_flotillas():
    rates = {1: 0, 2: 0, 3: 1}
    candidates = tuple(
        Candidate(number=n, rates=(100.0,), epochs_done=phase) for n, phase in rates.items()
    )
    problem = AllocationProblem(candidates=candidates, nodes=((0, 1, 2),))
    assert len(MipAllocator().allocate(problem).flotillas) == 1
    plan = MipAllocator().allocate(replace(problem, phases=True))
    together = [{a.number for a in f.assignments} for f in plan.flotillas]
    assert sorted(together, key=min) == [{1, 2}, {3}]


def test_mip_prefers_a_whole_phase_to_a_further_stream():
    ahead = Candidate(number=1, rates=(100.0,), epochs_done=5)
    phase = [Candidate(number=n, rates=(100.0,)) for n in (2, 3)]
    problem = AllocationProblem(candidates=(ahead, *phase), nodes=((0, 1),), phases=True)
    assert counts(MipAllocator().allocate(problem)) == {2: 1, 3: 1}


@pytest.mark.parametrize(
    ("capacity", "expected"),
    [(60.0, {2: 2, 3: 2, 4: 2}), (187.0, {2: 2, 3: 2, 4: 2}), (189.0, {1: 1, 2: 2, 3: 2, 4: 1})],
)
def test_mip_spends_the_capacity_where_it_gives_most_work(capacity, expected):
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
    assert counts(plan) == expected


def test_mip_groups_around_the_fastest_where_that_draws_less():
    # From below {10, 19} and {21} draw 40, from above {10} and {19, 21} draw 31.
    candidates = tuple(Candidate(number=n, rates=(float(n),)) for n in (10, 19, 21))
    problem = AllocationProblem(
        candidates=candidates, nodes=((0, 1, 2),), preprocess_samples_per_s=31.0
    )
    plan = MipAllocator().allocate(problem)
    validate(problem, plan)
    assert [sorted(a.number for a in f.assignments) for f in plan.flotillas] == [[19, 21], [10]]


@pytest.mark.parametrize("phases", [False, True])
def test_mip_with_too_small_a_capacity_flies_the_slowest_and_who_is_no_faster(phases):
    twin = Candidate(number=5, rates=(40.0, 75.0), epochs_done=3)
    problem = replace(
        slide_problem(), preprocess_samples_per_s=10.0, phases=phases, rate_spread=math.inf
    )
    assert counts(MipAllocator().allocate(problem)) == {4: 1}
    twins = replace(problem, candidates=(*problem.candidates, twin))
    assert counts(MipAllocator().allocate(twins)) == ({4: 1} if phases else {4: 1, 5: 1})


def test_mip_plans_around_what_can_not_move():
    # On its own the slow one would fly on three devices, or stop for the others.
    stuck = replace(slide_problem().by_number[4], devices=(0, 2), movable=False)
    problem = replace(slide_problem(), candidates=(*slide_problem().candidates[:3], stuck))
    plan = MipAllocator(rescale_penalty=0.0).allocate(problem)
    assert plan.assignments[4].devices == (0, 2)
    assert sum(counts(plan).values()) == 4


def test_references_from_above_hold_the_slowest_and_the_fastest():
    rates = [1.01**k for k in range(300)]
    for from_above in (False, True):
        thinned = reference_rates(rates, most=12, from_above=from_above)
        assert len(thinned) <= 12
        assert set(thinned) <= set(rates)
        assert (thinned[0], thinned[-1]) == (rates[0], rates[-1])


def test_mip_keeps_a_capacity_of_which_it_can_not_try_all_rates():
    stuck = Candidate(number=90, rates=(17.3,), devices=(0,), movable=False)
    candidates = tuple(
        Candidate(number=n, rates=tuple((10.0 + 3.7 * n) * m**0.9 for m in range(1, 9)))
        for n in range(20)
    )
    nodes = tuple((n, n + 1, n + 2, n + 3) for n in range(0, 24, 4))
    for capacity in (200.0, 17.3, 1.0):
        problem = AllocationProblem(
            candidates=(*candidates, stuck),
            nodes=nodes,
            time_limit_s=20.0,
            preprocess_samples_per_s=capacity,
        )
        plan = MipAllocator().allocate(problem)
        validate(problem, plan)
        assert len(plan.assignments) > 1  # at least who is no faster joins


def test_mip_widens_as_little_as_it_must():
    # FLEET's {1: 1, 4: 3} makes 1 + 105/40 of four devices; three trials with one on two make
    # 3.875.
    plan = MipAllocator().allocate(slide_problem())
    assert sorted(counts(plan).values()) == [1, 1, 2]
    assert len(plan.flotillas) == 1


@pytest.mark.parametrize(("cost", "flying"), [(0.25, 3), (0.05, 4)])
def test_mip_opens_a_further_flotilla_only_where_that_pays(cost, flying):
    plan = MipAllocator(flotilla_cost=cost).allocate(slide_problem())
    assert len(plan.assignments) == flying
    assert len(plan.flotillas) == (1 if flying == 3 else 2)


def test_mip_lets_a_trial_fly_on_where_a_move_does_not_pay():
    rates = (100.0, 110.0)
    flying = Candidate(number=1, rates=rates, devices=(1,))
    problem = AllocationProblem(candidates=(flying,), nodes=((0, 1),))
    assert counts(MipAllocator(rescale_penalty=0.25).allocate(problem)) == {1: 1}
    assert counts(MipAllocator(rescale_penalty=0.05).allocate(problem)) == {1: 2}


def test_mip_does_not_break_up_a_second_flotilla_to_widen_the_first():
    fast = [Candidate(number=n, rates=(400.0, 760.0), devices=(n,)) for n in (0, 1)]
    slow = [Candidate(number=n, rates=(10.0, 19.0), devices=(n,)) for n in (2, 3)]
    problem = AllocationProblem(candidates=(*fast, *slow), nodes=((0, 1, 2, 3),))
    plan = MipAllocator().allocate(problem)
    assert {t: a.devices for t, a in plan.assignments.items()} == {n: (n,) for n in range(4)}
    assert "in 2 flotillas at 400 and 10 samples/s" in plan.reason


@pytest.mark.parametrize("rate", [100.0, 5.0])
def test_mip_lets_a_trial_win_that_was_passed_over_often_enough(rate):
    rivals = [Candidate(number=n, rates=(100.0,), devices=(n,)) for n in (0, 1)]
    for waited, expected in ((0, False), (10, False), (100, True)):
        late = Candidate(number=9, rates=(rate,), waited_rounds=waited)
        problem = AllocationProblem(candidates=(*rivals, late), nodes=((0, 1),))
        assert (9 in MipAllocator().allocate(problem).assignments) is expected


def test_mip_with_more_rates_than_it_may_try_still_fills_the_fleet():
    candidates = tuple(
        Candidate(number=n, rates=tuple((10.0 + 3.7 * n) * m**0.9 for m in range(1, 9)))
        for n in range(20)
    )
    nodes = tuple((n, n + 1, n + 2, n + 3) for n in range(0, 24, 4))
    problem = AllocationProblem(candidates=candidates, nodes=nodes, time_limit_s=20.0)
    plan = MipAllocator().allocate(problem)
    validate(problem, plan)
    assert sum(counts(plan).values()) == 24
    assert plan.gap is not None
    assert plan.gap < 1e-4


@pytest.mark.parametrize("ending", ["NO_SOLUTION_FOUND", "ERROR", None])
def test_mip_without_an_incumbent_has_no_answer(monkeypatch, ending):
    def optimize(model, **options):
        if ending is None:
            raise mip.InterfacingError("gone")
        return mip.OptimizationStatus[ending]

    monkeypatch.setattr(mip.Model, "optimize", optimize)
    with pytest.raises(AllocationFailed, match=ending or "InterfacingError: gone"):
        MipAllocator().allocate(slide_problem())


def test_mip_out_of_time_is_never_worse_than_flying_on(monkeypatch):
    def run_solver(self, problem, values):
        return {3: 2, 4: 2}, "feasible", 0.5

    monkeypatch.setattr(MipAllocator, "_run_solver", run_solver)
    flying = [replace(c, devices=(c.number,)) for c in slide_problem().candidates]
    problem = replace(slide_problem(), candidates=tuple(flying), nodes=((1, 2, 3, 4),))
    plan = MipAllocator().allocate(problem)
    assert counts(plan) == {1: 1, 2: 1, 3: 1, 4: 1}
    assert (plan.status, plan.gap) == ("feasible", 0.5)
