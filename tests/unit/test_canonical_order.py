"""The order of an epoch, and the seeds of its samples: canonical, in this version and the next."""

from __future__ import annotations

import random

import numpy as np
import pytest

from optuna_fleet.pipeline.preprocessor.order import is_generator, permutation, seed_sample


def test_permutations_never_change_between_versions() -> None:
    assert permutation(0, "train", 0, 8).tolist() == [3, 1, 5, 2, 0, 6, 4, 7]


@pytest.mark.parametrize("other", [(2, "a", 0, 0), (1, "b", 0, 0), (1, "a", 1, 0), (1, "a", 0, 1)])
def test_all_that_a_sample_is_known_by_counts(other: tuple[int, str, int, int]) -> None:
    def drawn(place: tuple[int, str, int, int]) -> tuple[float, float]:
        seed_sample(*place)
        return float(np.random.rand()), random.random()

    place = (1, "a", 0, 0)
    assert drawn(place) == drawn(place)
    assert set(drawn(place)).isdisjoint(drawn(other))
    if other[3] == 0:
        assert (permutation(*place[:3], 100) != permutation(*other[:3], 100)).any()


def test_what_can_not_be_seeded_is_no_generator() -> None:
    assert not any(map(is_generator, (random.SystemRandom(), 3, random, np.random.PCG64(0))))
