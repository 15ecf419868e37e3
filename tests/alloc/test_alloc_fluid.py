"""The fluid optimum: how fast all could finish if devices were divisible."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optuna_fleet.alloc.fluid import fluid_optimum

LINEAR = (10.0, 20.0, 30.0, 40.0)
BENT = (10.0, 15.0, 17.5, 18.75)


@st.composite
def concave_rates(draw, devices):
    gains = sorted(draw(st.lists(st.floats(1, 50), min_size=devices, max_size=devices)))[::-1]
    return tuple(itertools.accumulate(gains))


@st.composite
def instances(draw, trials=3, devices=4):
    rates = [draw(concave_rates(devices)) for _ in range(trials)]
    return rates, [draw(st.floats(10, 1000)) for _ in rates]


def rate_at(rates, width):
    """Of a concave trial on a fraction of a device."""
    return np.interp(width, range(len(rates) + 1), (0.0, *rates))


def test_two_trials_by_hand():
    # At pace p the linear one takes 10 p devices, the other 1 + (60 p - 10) / 5: 22 p = 5.
    seconds, widths = fluid_optimum([LINEAR, BENT], [100.0, 60.0], 4)
    assert seconds == pytest.approx(22 / 5)
    assert widths == pytest.approx([50 / 22, 38 / 22])


@settings(max_examples=50)
@given(instances())
def test_no_split_of_the_devices_is_faster(instance):
    rates, work = instance
    steps = np.linspace(0, 4, 161)[1:]
    a, b = np.meshgrid(steps, steps)
    c = (4 - a - b).clip(min=1e-9)
    times = [w / rate_at(r, x) for r, w, x in zip(rates, work, (a, b, c), strict=True)]
    best = np.where(a + b < 4, np.maximum.reduce(times), np.inf).min()
    seconds, widths = fluid_optimum(rates, work, 4)
    assert widths.sum() <= 4 + 1e-9
    reached = max(w / rate_at(r, x) for r, w, x in zip(rates, work, widths, strict=True))
    assert reached == pytest.approx(seconds)
    assert seconds <= best * (1 + 1e-9)


@settings(max_examples=50)
@given(st.lists(st.lists(st.floats(1, 100), min_size=1, max_size=6), min_size=1, max_size=5))
def test_nobody_gets_more_than_its_peak(rates):
    rates = [tuple(r) for r in rates]
    _, widths = fluid_optimum(rates, [1.0] * len(rates), 64)
    assert widths == pytest.approx([r.index(max(r)) + 1 for r in rates])
