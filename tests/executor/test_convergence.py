"""When a trial has converged."""

from __future__ import annotations

import pytest

from optuna_fleet import Convergence, FleetConfigError


@pytest.mark.parametrize(
    ("values", "reached"),
    [
        ([], False),
        ([0.5], False),
        ([0.5, 0.6, 0.7], False),
        ([0.7, 0.6], False),
        ([0.7, 0.6, 0.65], True),
        ([0.7, 0.705, 0.709], True),  # not better by more than 0.01
        ([0.7, 0.6, 0.72], False),
        ([float("nan"), float("nan")], True),
        ([float("nan"), 0.5, 0.6], False),
    ],
)
def test_patience_and_minimum_improvement(values: list[float], reached: bool) -> None:
    convergence = Convergence(patience=2, min_improvement=0.01)
    assert convergence.is_reached(values, maximize=True) is reached
    mirrored = [-value for value in values]
    assert convergence.is_reached(mirrored, maximize=False) is reached


@pytest.mark.parametrize("arguments", [{"patience": 0}, {"patience": 1, "min_improvement": -1}])
def test_nonsense_is_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(FleetConfigError, match="but must be"):
        Convergence(**arguments)
