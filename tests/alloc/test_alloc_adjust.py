"""Small changes: who keeps, gives up and gets devices."""

from dataclasses import replace

import pytest
from alloc_cases import ruled_problems
from hypothesis import given, settings
from hypothesis import strategies as st

from optuna_fleet.alloc import AllocationProblem, Candidate
from optuna_fleet.alloc.adjust import Wishes, place_changes, realise
from optuna_fleet.alloc.streams import serves

RATES = (100.0, 190.0, 270.0, 340.0)


def flying(number, devices=(), **more):
    return Candidate(number=number, rates=RATES, devices=devices, **more)


def problem_of(*candidates, nodes=((0, 1, 2, 3),), **more):
    return AllocationProblem(candidates=candidates, nodes=nodes, **more)


def realised(problem, widths, pays=lambda candidate, now, m: True):
    return realise(problem, Wishes(widths=widths, pays=pays))


def test_who_shrinks_makes_room_for_who_starts():
    problem = problem_of(flying(1, (0, 1, 2, 3)), flying(2))
    assert realised(problem, {2: 3, 1: 1}) == {1: 1, 2: 3}


def test_who_can_not_move_stays_and_the_first_in_line_get_the_rest():
    problem = problem_of(flying(1, (0, 1), movable=False), flying(2), flying(3))
    assert realised(problem, {3: 3, 2: 1}) == {1: 2, 3: 2}
    assert realised(problem, {2: 1, 3: 3}) == {1: 2, 2: 1, 3: 1}


def test_flying_trials_grow_before_waiting_ones_start():
    problem = problem_of(flying(1, (0,)), flying(2, (1, 2), movable=False), flying(3))
    assert realised(problem, {3: 2, 1: 2}) == {1: 2, 2: 2}
    refusing = realised(problem, {3: 2, 1: 2}, pays=lambda candidate, now, m: now == 0)
    assert refusing == {1: 1, 2: 2, 3: 1}


def test_who_has_no_wish_waits():
    assert realised(problem_of(flying(1, (0,)), flying(2, (1,))), {2: 1}) == {2: 1}


def test_what_a_loss_left_is_not_flown_on_if_it_is_too_little():
    stuck = flying(1, (1, 2, 3), movable=False)
    problem = problem_of(flying(0, (0,), min_devices=2), stuck)
    assert realised(problem, {0: 2, 1: 2}) == {1: 3}


def test_what_the_preprocessors_can_not_serve_gets_less():
    problem = problem_of(flying(1, (0, 1)), flying(2), preprocess_samples_per_s=200.0)
    assert realised(problem, {1: 3, 2: 1}) == {1: 2, 2: 1}
    assert realised(replace(problem, rate_spread=1.5), {1: 3, 2: 1}) == {1: 2}
    assert realised(replace(problem, preprocess_samples_per_s=120.0), {1: 3}) == {1: 1}


def test_the_slowest_flies_if_nobody_else_is_served():
    slow = Candidate(number=2, rates=(50.0,))
    problem = problem_of(flying(1), slow, preprocess_samples_per_s=10.0)
    assert realised(problem, {1: 4}) == {2: 1}
    assert realised(problem, {}) == {2: 1}


@settings(max_examples=200)
@given(problem=ruled_problems(), seed=st.randoms(use_true_random=False))
def test_any_wishes_give_widths_that_can_be_flown(problem, seed):
    wishes = {
        c.number: seed.randint(c.min_devices, c.widest)
        for c in problem.candidates
        if seed.random() < 0.8
    }
    widths = realised(problem, wishes)
    placed = place_changes(problem, widths)
    devices = [device for own in placed.values() for device in own]
    assert {t: len(own) for t, own in placed.items()} == widths
    assert len(set(devices)) == len(devices)
    assert set(devices) <= set(problem.devices)
    assert all(placed[t] == problem.by_number[t].devices for t in problem.pinned)
    assert set(widths) <= set(problem.pinned) or serves(problem)(widths)


def test_devices_are_kept_and_the_youngest_given_up():
    joined = {0: 5, 1: 9, 3: 1}  # device 2 has been there from the start
    problem = problem_of(flying(1, (3, 0, 1, 2)), joined=joined)
    assert place_changes(problem, {1: 4}) == {1: (3, 0, 1, 2)}
    assert place_changes(problem, {1: 3}) == {1: (0, 2, 3)}
    assert place_changes(problem, {1: 1}) == {1: (2,)}


def test_who_grows_keeps_what_it_has_and_stays_on_its_node():
    problem = problem_of(flying(1, (5,)), flying(2), nodes=((0, 1, 2), (4, 5, 6, 7)))
    assert place_changes(problem, {1: 3, 2: 3}) == {1: (4, 5, 6), 2: (0, 1, 2)}


@pytest.mark.parametrize("movable", [True, False])
def test_two_trials_that_claim_a_device_do_not_both_get_it(movable):
    problem = problem_of(flying(1, (0, 1)), flying(2, (1, 2), movable=movable))
    placed = place_changes(problem, realised(problem, {1: 2, 2: 2}))
    assert len({*placed[1], *placed[2]}) == 4
    assert movable or placed[2] == (1, 2)
