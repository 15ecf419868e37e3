"""On how many devices a trial may train."""

from __future__ import annotations

import pytest

from optuna_fleet.trainer.run_parts import Bounds


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
