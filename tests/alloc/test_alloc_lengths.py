"""How long trials will still train, learnt from those that have ended."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optuna_fleet.alloc.lengths import (
    LONGEST,
    MAX_CORRECTION,
    expected_lengths,
    remaining_epochs,
)

epochs = st.lists(st.integers(0, 1200), max_size=40)


@pytest.mark.parametrize("truth", [4, 8, 30])
def test_the_expectation_goes_to_the_truth_as_trials_end(truth):
    under_way = [truth // 2] * 32
    errors = [
        abs(expected_lengths([truth] * ended, under_way[ended:])[0] - truth)
        for ended in (0, 1, 4, 16, 32)
    ]
    assert errors[0] > 0.2 * truth
    assert errors[0] > errors[1] > errors[3]
    assert errors[-1] < 0.05 * truth


def test_trials_that_go_on_make_all_trials_look_longer():
    few, many = (expected_lengths([], [done] * 10)[0] for done in (5, 20))
    assert few < many


@settings(max_examples=40)
@given(ended=epochs, under_way=epochs)
def test_any_history_gives_finite_lengths_beyond_what_is_done(ended, under_way):
    expected = expected_lengths(ended, under_way)
    assert expected.shape == (LONGEST + 1,)
    assert np.isfinite(expected).all()
    assert (expected > np.arange(LONGEST + 1)).all()
    assert (np.diff(expected) >= -1e-6).all()


@pytest.mark.parametrize("done", [0, 1, LONGEST, LONGEST + 1, 1000])
def test_at_least_one_epoch_is_left_whatever_is_done_or_predicted(done):
    expected = expected_lengths([1], [done])
    for predicted in (None, 0.0, float(done), float("nan"), float("inf")):
        assert remaining_epochs(expected, done, predicted) >= 1.0


def test_a_prediction_counts_within_bounds():
    expected = expected_lengths([20] * 10, [])
    own = remaining_epochs(expected, 0, None)
    assert own == pytest.approx(20, rel=0.05)
    assert remaining_epochs(expected, 0, 25.0) == 25.0
    assert remaining_epochs(expected, 5, 25.0) == 20.0
    assert remaining_epochs(expected, 0, 1e6) == own * MAX_CORRECTION
    assert remaining_epochs(expected, 0, 1.0) == own / MAX_CORRECTION
    assert remaining_epochs(expected, 0, float("nan")) == own
