"""The rules of waves: the paper's worked example, and that they never stop each other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optuna_fleet.virtual_workers.wsp import (
    Flush,
    Pass,
    Tag,
    Turn,
    Turns,
    WaveSynchronous,
    check_clocks,
    held_minibatches,
    tag_of,
)

F, B = Pass.FORWARD, Pass.BACKWARD


def test_the_papers_example():
    wsp = WaveSynchronous(4, 0)  # Figure 3: s_local = 3, D = 0
    assert wsp.global_staleness == 6
    assert [wsp.least_clock(p) for p in (7, 8, 11, 12)] == [0, 1, 1, 2]
    assert tag_of(wsp, 11, 1) == Tag(local=7, clock=1)  # own 5, 6, 7 and all of wave 0


@given(st.integers(1, 8), st.integers(0, 5), st.integers(1, 200), st.integers(0, 3))
def test_what_may_start_keeps_to_the_published_bounds(m, distance, number, newer):
    wsp = WaveSynchronous(m, distance)
    clock = min(wsp.least_clock(number) + newer, (number - 1) // m)
    if clock >= wsp.least_clock(number):
        wsp.check_start(number, tag_of(wsp, number, clock))


@given(st.integers(1, 8), st.integers(0, 5), st.integers(1, 200))
def test_older_weights_break_a_bound(m, distance, number):
    wsp = WaveSynchronous(m, distance)
    needed = wsp.least_clock(number)
    if needed:
        with pytest.raises(AssertionError, match="clock distance"):
            wsp.check_start(number, Tag(max(0, number - m), needed - 1))
    if number > m:
        with pytest.raises(AssertionError, match="local staleness"):
            wsp.check_start(number, Tag(number - m - 1, needed))


def test_the_bound_on_what_others_did_is_tight():
    wsp = WaveSynchronous(4, 2)
    missing = [p - 1 - wsp.least_clock(p) * 4 for p in range(1, 100)]
    assert max(missing) == wsp.global_staleness


def test_a_flush_starts_with_all_that_came_before():
    flush = Flush(3)
    starts = [tag_of(flush, p, flush.least_clock(p)) for p in (1, 3, 4, 7)]
    assert [tag.local for tag in starts] == [0, 0, 3, 6]


def test_clocks_are_at_most_the_distance_and_one_apart():
    check_clocks([3, 4], 0)
    with pytest.raises(AssertionError):
        check_clocks([3, 5], 0)


def test_a_stage_does_backward_passes_first_and_keeps_to_its_credit():
    turns = Turns(credit=2)
    for number in (1, 2, 3):
        turns.arrive(Turn(F, number))
    for number in (1, 2):
        assert turns.next(lambda _: True) == Turn(F, number)
        turns.finish(Turn(F, number))
    assert turns.next(lambda _: True) is None  # no credit for the third
    turns.arrive(Turn(B, 1))
    assert turns.next(lambda _: True) == Turn(B, 1)
    turns.finish(Turn(B, 1))
    assert turns.next(lambda _: False) is None  # its weights are not there
    assert turns.next(lambda _: True) == Turn(F, 3)


def test_messages_out_of_order_are_noticed():
    with pytest.raises(AssertionError, match="came after"):
        Turns(credit=1).arrive(Turn(F, 2))


def test_credits_are_what_memory_was_counted_for():
    assert [held_minibatches(q, 4, 7) for q in range(4)] == [7, 5, 3, 1]
    assert [held_minibatches(q, 4, 2) for q in range(4)] == [2, 2, 2, 1]
