"""How long trials will still train: what they say, and what those that have ended teach."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optuna_fleet.alloc.lengths import MAX_CORRECTION, survival_curve

epochs = st.lists(st.integers(0, 3000), max_size=40)
bounds = st.none() | st.integers(1, 10**9)


def hazard(curve, k):
    return 1 - curve.goes_on[k]


def test_the_share_that_ends_is_kaplan_and_meiers_where_many_were_seen():
    # After 3 epochs 100 of 1,000 end, after 5 half of the 600 that may go on beyond them.
    curve = survival_curve([3] * 100 + [5] * 300, [4] * 200 + [8] * 300, [5] * 100)
    assert hazard(curve, 3) == pytest.approx(100 / 1000, rel=0.01)
    assert hazard(curve, 5) == pytest.approx(300 / 600, rel=0.01)
    assert hazard(curve, 4) < 0.01
    assert hazard(curve, 8) < 0.01


def test_without_ends_a_trial_goes_on_to_its_bound():
    for bound in (1, 2, 30, 1000, 10**6, 10**9):
        assert survival_curve([], [], []).remaining_epochs(0, bound) > 0.7 * min(bound, 40)
    assert survival_curve([], [30] * 50, []).remaining_epochs(10, 40) == pytest.approx(
        30, rel=0.02
    )
    curve = survival_curve([], [], [17] * 100)
    assert curve.remaining_epochs(0, 17) == pytest.approx(17, rel=0.02)


@pytest.mark.parametrize("done", [0, 5, 14])
def test_the_more_are_pruned_the_sooner_a_trial_is_expected_to_end(done):
    curves = [survival_curve([2] * n, [done] * 10, [15] * (50 - n)) for n in (0, 10, 40)]
    never, some, most = (curve.remaining_epochs(done, 15) for curve in curves)
    assert never >= some >= most
    assert never > most or done == 14


@pytest.mark.parametrize("truth", [4, 8, 30])
def test_lengths_that_nobody_tells_are_learnt(truth):
    curves = [survival_curve([truth] * n, [truth // 2] * (64 - n)) for n in (0, 1, 8, 64)]
    errors = [abs(curve.remaining_epochs(0) - truth) for curve in curves]
    assert errors[3] <= errors[2] <= max(errors[:2])
    assert errors[-1] < 0.1 * truth


@settings(max_examples=60)
@given(
    ended=epochs, under_way=epochs, bounded=epochs, done=st.integers(0, 3000), max_epochs=bounds
)
def test_any_history_gives_finite_lengths_within_the_bound(
    ended, under_way, bounded, done, max_epochs
):
    curve = survival_curve(ended, under_way, bounded)
    for predicted in (None, 0.0, float(done), 1e9, math.nan, math.inf):
        left = curve.remaining_epochs(done, max_epochs, predicted)
        assert 1.0 <= left < math.inf
        if max_epochs is not None:
            assert left <= max(1.0, (max_epochs - done) * (1 + 1e-9))


def test_a_prediction_counts_within_bounds():
    curve = survival_curve([20] * 10, [])
    own = curve.remaining_epochs(0)
    assert own == pytest.approx(20, rel=0.25)
    assert curve.remaining_epochs(0, predicted=own + 1) == own + 1
    assert curve.remaining_epochs(5, predicted=15.0) == 10.0
    assert curve.remaining_epochs(0, predicted=1.0) == own / MAX_CORRECTION
    assert curve.remaining_epochs(0, predicted=math.nan) == own
    told = survival_curve([2] * 50, [], [40] * 50)
    own = told.remaining_epochs(0, 400)
    assert told.remaining_epochs(0, 400, predicted=1e6) == pytest.approx(own * MAX_CORRECTION)
    assert told.remaining_epochs(0, 40, predicted=1e6) == 40
