"""What every allocator must keep to."""

from dataclasses import replace

import mip
import pytest
from alloc_cases import best_objective, counts, problems, slide_problem
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from optuna_fleet.alloc import (
    AllocationFailed,
    AllocationProblem,
    Candidate,
    GreedyAllocator,
    MipAllocator,
    validate,
)

ALLOCATORS = [
    GreedyAllocator(),
    GreedyAllocator(delta=20.0),
    GreedyAllocator(keep_flying=True),
    MipAllocator(),
    MipAllocator(max_flotillas=1, rescale_penalty=0.0),
]
every_allocator = pytest.mark.parametrize("allocator", ALLOCATORS, ids=repr)


@every_allocator
@settings(max_examples=40, deadline=None)
@given(problem=problems())
def test_plans_can_be_flown_and_say_why(allocator, problem):
    plan = allocator.allocate(problem)
    validate(problem, plan)
    assert plan.allocator == allocator.name
    assert plan.reason
    assert plan.status


@every_allocator
@settings(max_examples=40, deadline=None)
@given(problem=problems())
def test_no_device_idles_while_a_trial_could_start_on_it(allocator, problem):
    plan = allocator.allocate(problem)
    idle = problem.num_devices - sum(counts(plan).values())
    waiting = [c for c in problem.candidates if c.number not in plan.assignments]
    assert all(c.min_devices > idle for c in waiting)


@every_allocator
@settings(max_examples=40, deadline=None)
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
@settings(max_examples=30, deadline=None)
@given(problem=problems(), order=st.randoms())
def test_plans_do_not_depend_on_the_order_of_candidates(allocator, problem, order):
    shuffled = list(problem.candidates)
    order.shuffle(shuffled)
    again = allocator.allocate(replace(problem, candidates=tuple(shuffled)))
    assert again == allocator.allocate(problem)


@pytest.mark.parametrize("allocator", [MipAllocator(), MipAllocator(max_flotillas=1)], ids=repr)
@settings(max_examples=40, deadline=None)
@given(problem=problems(max_candidates=4, max_devices=6))
def test_mip_finds_the_optimum_and_greedy_never_beats_it(allocator, problem):
    # A trial worth less than its flotilla's cost flies on idle devices all the same.
    assume(all(c.rate(c.min_devices) > c.rate(1) / 4 for c in problem.candidates))
    best = best_objective(problem, allocator)
    plan = allocator.allocate(problem)
    if len(plan.flotillas) <= (allocator.max_flotillas or len(plan.flotillas)):
        assert allocator.objective(problem, counts(plan)) == pytest.approx(best, abs=1e-5)
    assert plan.status in ("optimal", "trivial")
    greedy = counts(GreedyAllocator().allocate(problem))
    assert MipAllocator().objective(problem, greedy) <= best_objective(problem) + 1e-9


@every_allocator
def test_a_fleet_with_an_idle_trial_but_no_device_says_so(allocator):
    plan = allocator.allocate(replace(slide_problem(), nodes=((), ())))
    assert plan.flotillas == ()
    assert "trial 1 waits: it needs 1 devices, there are 0" in plan.reason


@every_allocator
def test_no_candidates_is_a_plan_too(allocator):
    assert allocator.allocate(replace(slide_problem(), candidates=())).flotillas == ()


@pytest.mark.parametrize("delta", [20.0, None])
def test_greedy_forms_the_flotilla_of_fleets_slides(delta):
    plan = GreedyAllocator(delta=delta).allocate(slide_problem())
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


@pytest.mark.parametrize(
    "broken",
    [
        {"rates": ()},
        {"rates": (1.0, 0.0)},
        {"rates": (1.0,), "min_devices": 2},
        {"rates": (1.0,) * 4, "min_devices": 3, "max_devices": 2},
    ],
)
def test_impossible_candidates_are_refused(broken):
    with pytest.raises(ValueError, match="trial 7"):
        Candidate(number=7, **broken)


@pytest.mark.parametrize(
    "broken", [{"nodes": ((0, 1), (1,))}, {"rate_spread": 0.5}, {"candidates": ()}]
)
def test_impossible_problems_are_refused(broken):
    twice = (Candidate(number=1, rates=(1.0,)),) * 2
    changes = broken if broken.get("candidates") is None else {"candidates": twice}
    with pytest.raises(ValueError, match=next(iter(broken))):
        replace(slide_problem(), **changes)
