"""The elastic allocator: what moves, who waits, and who gets how much."""

import math
from dataclasses import replace
from itertools import accumulate, pairwise, product

import numpy as np
import pytest
from alloc_cases import counts, problems
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from optuna_fleet.alloc import (
    AllocationProblem,
    Candidate,
    ElasticAllocator,
    EqualSplitAllocator,
    validate,
)
from optuna_fleet.alloc.elastic import count_problem
from optuna_fleet.alloc.lengths import MAX_CORRECTION
from optuna_fleet.exceptions import FleetConfigError

MAKESPAN = ElasticAllocator()
THROUGHPUT = ElasticAllocator(objective="throughput")
EFFICIENCY = ElasticAllocator(objective="scaling-efficiency")
LINEAR = tuple(10.0 * m for m in range(1, 9))


def trial(number, rates=LINEAR, devices=(), **more):
    return Candidate(number=number, rates=rates, devices=devices, **more)


def problem_of(*candidates, devices=4, **more):
    return AllocationProblem(candidates=candidates, nodes=(tuple(range(devices)),), **more)


def after(problem, plan):
    """The same problem, once the plan is flown."""
    flown = {t: a.devices for t, a in plan.assignments.items()}
    moved = [replace(c, devices=flown.get(c.number, ())) for c in problem.candidates]
    return replace(problem, candidates=tuple(moved))


# -- worth of a width: BFTrainer, Eq. 13 to 16 --------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "objective", "worth"),
    [
        ((), "throughput", [0, 600, 1080, 1440]),
        ((0,), "throughput", [-30, 600, 1030, 1390]),
        ((0, 1), "throughput", [-54, 546, 1080, 1350]),
        ((0,), "scaling-efficiency", [-3, 60, 103, 139]),
        ((0,), lambda candidate, m: m**2, [-3, 60, 235, 535]),
    ],
)
def test_the_worth_of_a_width_by_hand(devices, objective, worth):
    candidate = trial(
        1, rates=(10.0, 18.0, 24.0), devices=devices, rescale_up_s=5.0, rescale_down_s=3.0
    )
    _, counting = count_problem(problem_of(candidate, devices=3), objective, 60.0)
    assert counting.values[0][0].tolist() == pytest.approx(worth)


def test_an_objective_of_the_users_must_give_numbers():
    with pytest.raises(ValueError, match=r"`objective` gives \[nan, nan, nan\] for trial 1"):
        count_problem(problem_of(trial(1), devices=3), lambda candidate, m: math.nan, 60.0)


def test_too_few_devices_are_worth_nothing_even_if_it_has_them():
    candidate = trial(1, devices=(0,), min_devices=3)
    _, counting = count_problem(problem_of(candidate), "throughput", 60.0)
    assert np.isneginf(counting.values[0][0]).tolist() == [False, True, True, False, False]


@pytest.mark.parametrize("objective", ["throughput", "scaling-efficiency", lambda c, m: c.rate(m)])
def test_a_move_is_made_only_if_it_pays_within_the_forward_looking_time(objective):
    # One more sample per second for 300 samples lost: that takes 300 s.
    problem = problem_of(trial(1, rates=(10.0, 11.0), devices=(2,), rescale_up_s=30.0))
    for seconds, width in ((299.0, 1), (301.0, 2)):
        allocator = ElasticAllocator(objective=objective, forward_looking_s=seconds)
        assert counts(allocator.allocate(problem)) == {1: width}


def test_throughput_gives_devices_to_whom_they_help_most():
    flat, steep = trial(1, rates=(10.0, 11.0, 12.0)), trial(2, rates=(9.0, 18.0, 27.0))
    assert counts(THROUGHPUT.allocate(problem_of(flat, steep))) == {1: 1, 2: 3}


def test_scaling_efficiency_does_not_favour_the_fast():
    fast, slow = trial(1, rates=(1000.0, 1100.0)), trial(2, rates=(10.0, 19.0))
    problem = problem_of(fast, slow, devices=3)
    assert counts(THROUGHPUT.allocate(problem)) == {1: 2, 2: 1}
    assert counts(EFFICIENCY.allocate(problem)) == {1: 1, 2: 2}


@settings(max_examples=60)
@given(problem=problems(pinning=False, max_candidates=3, max_devices=5))
def test_no_widths_have_a_better_throughput(problem):
    options = [(0, *range(c.min_devices, c.widest + 1)) for c in problem.candidates]
    best = max(
        sum(c.rate(m) for c, m in zip(problem.candidates, widths, strict=True) if m)
        for widths in product(*options)
        if sum(widths) <= problem.num_devices
    )
    plan = THROUGHPUT.allocate(problem)
    assert sum(a.rate for a in plan.assignments.values()) == pytest.approx(best)


# -- who moves ----------------------------------------------------------------------------------


def test_who_grows_keeps_its_devices_and_who_shrinks_gives_up_the_youngest():
    flat = trial(1, rates=(10.0, 11.0, 12.0), devices=(0, 1, 2))
    steep = trial(2, rates=(9.0, 18.0, 27.0), devices=(3,))
    problem = problem_of(flat, steep, joined={0: 4, 1: 2, 2: 3, 3: 7})
    plan = THROUGHPUT.allocate(problem)
    assert plan.assignments[1].devices == (1,)
    assert plan.assignments[2].devices == (0, 2, 3)


@pytest.mark.parametrize("allocator", [MAKESPAN, THROUGHPUT, EFFICIENCY, EqualSplitAllocator()])
def test_who_can_not_move_keeps_all_it_has(allocator):
    rates = (10.0, 19.0, 27.0, 34.0)
    stuck = trial(1, rates, devices=(3, 1, 0), movable=False)
    plan = allocator.allocate(problem_of(stuck, trial(2, rates)))
    assert plan.assignments[1].devices == (3, 1, 0)
    assert plan.assignments[2].devices == (2,)


def two_long_ones_among_six(**more):
    lengths = [3.0, 3.0, 1.0, 1.0, 1.0, 1.0]
    return problem_of(
        *(trial(k, devices=(k,), samples_per_epoch=100 * x) for k, x in enumerate(lengths)),
        devices=6,
        **more,
    )


def test_nobody_gets_the_devices_of_others_while_many_trials_are_to_come():
    assert max(counts(MAKESPAN.allocate(two_long_ones_among_six())).values()) > 1
    plan = MAKESPAN.allocate(two_long_ones_among_six(num_to_come=6))
    assert counts(plan) == dict.fromkeys(range(6), 1)


def test_who_is_wide_leaves_devices_to_those_to_come():
    problem = problem_of(trial(1, devices=(0, 1, 2, 3)))
    assert counts(MAKESPAN.allocate(problem)) == {1: 4}
    assert counts(MAKESPAN.allocate(replace(problem, num_to_come=3))) == {1: 1}
    assert counts(MAKESPAN.allocate(replace(problem, num_to_come=10**9))) == {1: 1}


@settings(max_examples=100)
@given(problem=problems(), num_to_come=st.integers(0, 60))
def test_plans_that_count_on_trials_to_come_are_plans_for_the_others(problem, num_to_come):
    problem = replace(problem, num_to_come=num_to_come)
    validate(problem, MAKESPAN.allocate(problem))


def test_no_trial_counts_for_longer_than_it_says_it_can_go_on():
    pair = [trial(k, devices=(k,), epochs_done=5) for k in (0, 1)]
    problem = problem_of(*pair, finished_epochs=(20,) * 5)
    assert counts(MAKESPAN.allocate(problem)) == {0: 2, 1: 2}
    told = replace(problem, candidates=(pair[0], replace(pair[1], max_epochs=10)))
    assert counts(MAKESPAN.allocate(told)) == {0: 3, 1: 1}
    past = replace(problem, candidates=(pair[0], replace(pair[1], max_epochs=3)))
    assert counts(MAKESPAN.allocate(past)) == {0: 3, 1: 1}


def concave(candidate):
    """The same trial, each further device of which helps less than the one before."""
    gains = sorted((abs(b - a) + 1e-3 for a, b in pairwise((0.0, *candidate.rates))), reverse=True)
    return replace(candidate, rates=tuple(accumulate(gains)))


@pytest.mark.parametrize(
    "allocator",
    [MAKESPAN, THROUGHPUT, EFFICIENCY, EqualSplitAllocator(), EqualSplitAllocator(published=True)],
    ids=repr,
)
@settings(max_examples=100)
@given(problem=problems(pinning=False))
def test_a_decision_that_is_repeated_moves_nobody(allocator, problem):
    if allocator is MAKESPAN:  # it follows the concave hull: steep late gains may mislead it
        problem = replace(problem, candidates=tuple(map(concave, problem.candidates)))
    plan = allocator.allocate(problem)
    again = allocator.allocate(after(problem, plan))
    assert {t: set(a.devices) for t, a in again.assignments.items()} == {
        t: set(a.devices) for t, a in plan.assignments.items()
    }


@pytest.mark.parametrize("allocator", [MAKESPAN, THROUGHPUT])
@settings(max_examples=60)
@given(problem=problems(pinning=False))
def test_no_device_idles_while_a_trial_could_start_on_it(allocator, problem):
    widths = counts(allocator.allocate(problem))
    idle = problem.num_devices - sum(widths.values())
    assert all(c.min_devices > idle for c in problem.candidates if c.number not in widths)


def test_a_trial_may_have_more_devices_than_it_can_fly_on_now():
    for allocator in (MAKESPAN, THROUGHPUT, EqualSplitAllocator()):
        problem = problem_of(trial(1, devices=(0, 1, 2), max_devices=2), trial(2))
        plan = allocator.allocate(problem)
        validate(problem, plan)
        assert counts(plan) == {1: 2, 2: 2}


# -- to be done soon ----------------------------------------------------------------------------


def test_equal_trials_share_equally_before_any_has_ended():
    assert counts(MAKESPAN.allocate(problem_of(trial(1), trial(2)))) == {1: 2, 2: 2}


def test_all_aim_to_finish_together():
    slow = trial(2, rates=tuple(r / 2 for r in LINEAR), samples_per_epoch=1.0)
    problem = problem_of(trial(1), slow, devices=6)
    assert counts(ElasticAllocator(hedge=0.0).allocate(problem)) == {1: 2, 2: 4}


def test_who_has_come_furthest_gets_least():
    problem = problem_of(
        trial(1, epochs_done=16), trial(2), trial(3), devices=5, finished_epochs=(20,) * 8
    )
    assert counts(MAKESPAN.allocate(problem)) == {1: 1, 2: 2, 3: 2}


def test_the_hedge_hastens_trials_with_long_epochs():
    slow = trial(2, rates=tuple(r / 4 for r in LINEAR))
    widths = [
        counts(ElasticAllocator(hedge=hedge).allocate(problem_of(trial(1), slow, devices=8)))[2]
        for hedge in (-1.0, 0.0, 0.6)
    ]
    assert widths == [4, 6, 7]


def test_the_longest_fly_first_if_there_are_more_trials_than_devices():
    trials = [trial(n, predicted_epochs=e) for n, e in enumerate((15.0, 24.0, 12.0, 20.0))]
    problem = problem_of(*trials, devices=2, finished_epochs=(16,) * 8)
    assert set(MAKESPAN.allocate(problem).assignments) == {1, 3}


def test_what_a_trial_that_can_not_move_leaves_goes_to_the_longest():
    for longest in (2, 3):
        waiting = [trial(n, predicted_epochs=24.0 if n == longest else 9.0) for n in (2, 3)]
        stuck = trial(1, devices=(0, 1, 2, 3), movable=False)
        problem = problem_of(stuck, *waiting, devices=5, finished_epochs=(16,) * 8)
        assert counts(MAKESPAN.allocate(problem)) == {1: 4, longest: 1}


def test_a_wrong_prediction_does_limited_harm():
    def widths(predicted):
        trials = [trial(1, predicted_epochs=predicted), trial(2), trial(3)]
        problem = problem_of(*trials, devices=8, finished_epochs=(10,) * 8)
        return counts(MAKESPAN.allocate(problem))

    assert MAX_CORRECTION == 2.0
    assert widths(1e9) == widths(20.0) == {1: 4, 2: 2, 3: 2}
    assert widths(0.0) == widths(5.0)
    assert widths(None) == widths(float("nan"))


def test_to_grow_must_gain_more_than_it_costs():
    # About 16 epochs of 100 samples at 10/s are 160 s; twice the rate would save 80 s.
    problem = problem_of(
        trial(1, devices=(0,), samples_per_epoch=100.0, rescale_up_s=200.0),
        trial(2, devices=(1,), movable=False),
        devices=3,
        finished_epochs=(16,) * 8,
    )
    assert counts(MAKESPAN.allocate(problem)) == {1: 1, 2: 1}
    cheap = replace(problem, candidates=(replace(problem.by_number[1], rescale_up_s=10.0),))
    assert counts(MAKESPAN.allocate(cheap)) == {1: 3}


def test_one_of_two_that_need_the_whole_fleet_flies():
    wide = [trial(n, min_devices=4, devices=(0, 1, 2, 3) * (n == 1)) for n in (1, 2)]
    assert counts(MAKESPAN.allocate(problem_of(*wide))) == {1: 4}


@settings(max_examples=60)
@given(problem=problems())
def test_no_trial_gets_a_width_at_which_a_narrower_one_is_as_fast(problem):
    assume(problem.candidates)
    plan = MAKESPAN.allocate(replace(problem, candidates=tuple(_waiting(problem))))
    for number, a in plan.assignments.items():
        rates = problem.by_number[number].rates
        least = problem.by_number[number].min_devices
        assert all(r < a.rate for r in rates[least - 1 : len(a.devices) - 1])


def _waiting(problem):
    return [replace(c, devices=(), movable=True) for c in problem.candidates]


# -- equal split --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("published", "least", "devices", "expected"),
    [
        (False, 1, 8, {0: 3, 1: 3, 2: 2}),
        (False, 1, 2, {0: 1, 1: 1}),
        (False, 2, 5, {0: 3, 1: 2}),
        (True, 1, 8, {0: 4, 1: 2, 2: 2}),
        (True, 1, 3, {0: 3}),
    ],
)
def test_equal_split_by_hand(published, least, devices, expected):
    trials = [trial(n, min_devices=least) for n in range(3)]
    allocator = EqualSplitAllocator(published=published)
    plan = allocator.allocate(problem_of(*trials, devices=devices))
    assert counts(plan) == expected


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ([{"max_devices": 1}, {}], {0: 1, 1: 7}),
        ([{}, {"max_devices": 2}, {"max_devices": 1}], {0: 5, 1: 2, 2: 1}),
        ([{"min_devices": 3}] * 3, {0: 4, 1: 4}),
    ],
)
def test_equal_split_leaves_no_device_that_somebody_may_have(limits, expected):
    rates = tuple(float(m) for m in range(1, 9))
    trials = [trial(n, rates, **limit) for n, limit in enumerate(limits)]
    plan = EqualSplitAllocator().allocate(problem_of(*trials, devices=8))
    assert counts(plan) == expected


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


# -- BFTrainer's Table 2 -------------------------------------------------------------------------

TABLE_2 = {  # 1000 samples/s on 1, 2, 4, ..., 64 nodes
    "AlexNet": (7.1, 13.1, 21.1, 40.5, 74.0, 130.8, 202.1),
    "ResNet18": (5.2, 10.6, 20.4, 39.6, 78.0, 144.8, 262.7),
    "DenseNet": (1.0, 2.0, 3.8, 7.6, 15.0, 28.8, 57.8),
}


def table_2_problem(num_nodes):
    widths = [2**k for k in range(7)]
    tables = [np.interp(range(1, 65), widths, table) for table in TABLE_2.values()]
    trials = [trial(n, tuple(table.tolist())) for n, table in enumerate(tables)]
    return problem_of(*trials, devices=num_nodes)


@pytest.mark.parametrize("num_nodes", [3, 20, 64, 100])
@pytest.mark.parametrize("allocator", [THROUGHPUT, EFFICIENCY])
def test_table_2_is_shared_out_as_well_as_can_be(allocator, num_nodes):
    problem = table_2_problem(num_nodes)
    first, second, third = (
        np.array([0.0, *c.rates]) / (1.0 if allocator is THROUGHPUT else c.rates[0])
        for c in problem.candidates
    )
    pairs = product(range(65), range(65))
    best = max(
        first[a] + second[b] + third[min(64, num_nodes - a - b)]
        for a, b in pairs
        if a + b <= num_nodes
    )
    plan = allocator.allocate(problem)
    got = {t: len(a.devices) for t, a in plan.assignments.items()}
    worth = first[got.get(0, 0)] + second[got.get(1, 0)] + third[got.get(2, 0)]
    assert worth == pytest.approx(best, rel=1e-12)


def test_throughput_starves_the_slow_model_of_table_2_and_efficiency_does_not():
    problem = table_2_problem(64)
    assert 2 not in THROUGHPUT.allocate(problem).assignments
    assert len(EFFICIENCY.allocate(problem).assignments[2].devices) > 20


def test_trials_do_not_take_turns_within_an_epoch():
    """Who waits has more to go than who flies; at the end of an epoch it gets its turn."""
    for is_within_epoch in (True, False):
        flying = [
            trial(k, devices=(k,), epochs_done=8, max_epochs=10, is_within_epoch=is_within_epoch)
            for k in range(4)
        ]
        waiting = [trial(4 + k, max_epochs=10) for k in range(2)]
        plan = counts(MAKESPAN.allocate(problem_of(*flying, *waiting)))
        assert (plan == dict.fromkeys(range(4), 1)) is is_within_epoch


@given(problems(), st.integers(0, 2**16))
def test_nobody_is_left_without_devices_within_an_epoch(problem, chosen):
    within = [
        replace(c, is_within_epoch=bool(c.devices) and bool(chosen >> k & 1))
        for k, c in enumerate(problem.candidates)
    ]
    problem = replace(problem, candidates=tuple(within))
    plan = MAKESPAN.allocate(problem)
    validate(problem, plan)
    for candidate in within:
        if candidate.is_within_epoch and problem.kept_width(candidate):
            assert candidate.number in plan.assignments
