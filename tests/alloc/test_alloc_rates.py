import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optuna_fleet.alloc.rates import DEFAULT_SCALING, RateProfile, pooled_scaling, rate_of


def profile(**measured):
    return RateProfile(structure="s", measured={int(k[1:]): float(v) for k, v in measured.items()})


def test_eq5_by_hand():
    # r(3)/3 = 90, r(2)/2 = 100: each further device leaves 0.9 of the rate per device.
    rates = profile(m1=110, m2=200, m3=270).rates(5)
    assert rates[3] == pytest.approx(4 * 90 * 0.9)
    assert rates[4] == pytest.approx(5 * 90 * 0.81)


def test_eq5_with_a_gap_before_the_largest_width_spreads_the_loss_over_the_steps():
    rates = profile(m2=200, m4=324).rates(5)
    assert rates[4] == pytest.approx(5 * 81 * 0.9)


def test_a_single_width_extrapolates_with_the_scaling_given():
    assert profile(m1=100).rates(3, scaling=0.5) == pytest.approx((100, 100, 75))
    assert profile(m1=100).rates(2)[1] == pytest.approx(200 * DEFAULT_SCALING)


def test_between_and_below_measured_widths():
    assert profile(m2=100, m4=180).rates(4) == pytest.approx((50, 100, 140, 180))


@settings(max_examples=60)
@given(
    st.dictionaries(st.integers(1, 64), st.floats(1e-300, 1e300), min_size=1, max_size=5),
    st.integers(1, 300),
    st.floats(0, 5),
)
def test_rates_are_finite_and_positive(measured, max_devices, scaling):
    rates = RateProfile(structure="s", measured=measured).rates(max_devices, scaling)
    assert len(rates) == max_devices
    assert all(math.isfinite(r) and r > 0 for r in rates)


def test_pooled_scaling_is_the_median_of_what_is_known():
    known = [profile(m1=100, m2=200 * f) for f in (0.9, 0.8, 0.1)]
    assert pooled_scaling([*known, profile(m1=5)]) == pytest.approx(0.8)
    assert pooled_scaling([profile(m1=5)]) == DEFAULT_SCALING
    assert pooled_scaling([profile(m1=1, m2=100)]) == 1.0
    assert pooled_scaling([profile(m1=100, m2=1)]) == 0.3


def test_rate_of_times_the_last_20_of_48_batches():
    durations = [9.0] * 28 + [0.5] * 20 + [7.0] * 5
    assert rate_of(durations, [32] * len(durations)) == pytest.approx(64)


def test_rate_of_ignores_one_pause_but_not_a_slow_half():
    assert rate_of([1.0] * 10 + [60.0] + [1.0] * 9, [10] * 20) == pytest.approx(10)
    assert rate_of([1.0, *[1.0, 3.0] * 10], [10] * 21) == pytest.approx(5, rel=0.06)


def test_rate_of_leaves_out_the_first_batch_unless_it_is_the_only_one():
    assert rate_of([5.0, 1.0], [10, 10]) == 10
    assert rate_of([5.0], [10]) == 2
