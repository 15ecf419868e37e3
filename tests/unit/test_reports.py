"""What a trial knows of its own reports, and on how many devices it may train."""

from __future__ import annotations

import math

import pytest

from optuna_fleet.trainer.run_parts import Bounds
from optuna_fleet.trainer.session import Reports

NAN = math.nan


def reported(maximize: bool, *values: float) -> Reports:
    reports = Reports(maximize)
    for step, value in enumerate(values):
        reports.add(value, step)
    return reports


@pytest.mark.parametrize(
    ("values", "least", "most"),
    [
        ([], None, None),
        ([NAN], None, None),
        ([NAN, 0.5, NAN], 0.5, 0.5),
        ([0.5, -2.0, 1.0], -2.0, 1.0),
        ([math.inf, -math.inf], -math.inf, math.inf),
    ],
)
def test_the_best_is_that_of_the_direction(
    values: list[float], least: float | None, most: float | None
) -> None:
    assert reported(False, *values).best == least
    assert reported(True, *values).best == most


def test_the_first_of_a_step_counts_as_in_the_study() -> None:
    reports = reported(False, 0.5)
    reports.add(0.1, 0)
    assert (reports.best, reports.values) == (0.5, {0: 0.5})


def test_what_a_checkpoint_tells_comes_first() -> None:
    reports = Reports(False)
    reports.add(0.7, 0)  # said again before the loop, as at the trial's beginning
    reports.add(0.3, 9)
    reports.begin_with({0: 0.6, 1: 0.2, 2: 0.4})
    assert list(reports.values.items()) == [(0, 0.6), (1, 0.2), (2, 0.4), (9, 0.3)]
    assert reports.best == 0.2


def test_only_improvements_are_the_best_so_far() -> None:
    reports = Reports(True)
    reports.begin_with({0: 0.1})
    values = [NAN, 0.1, 0.3, 0.2, 0.3, 0.4]
    assert [v for step, v in enumerate(values, start=1) if reports.add(v, step)] == [0.3, 0.4]


@pytest.mark.parametrize(
    ("least", "most", "num_samples", "wanted"),
    [
        (1, None, 8, 8),  # no rank without a sample
        (3, None, 2, 3),  # but for as many as it asks for
        (1, 4, 8, 4),
        (3, 3, 2, 3),
    ],
)
def test_it_has_no_more_devices_than_samples_unless_it_asks_for_them(
    least: int, most: int | None, num_samples: int, wanted: int
) -> None:
    assert Bounds(min_devices=least, max_devices=most).most_for(num_samples) == wanted
