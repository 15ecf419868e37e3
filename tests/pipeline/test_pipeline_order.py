import random

import numpy as np
import torch

from optuna_fleet.pipeline.preprocessor.order import permutation, seed_sample

PINNED = [3, 1, 5, 2, 0, 6, 4, 7]


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), float(np.random.rand()), random.random()


def test_permutation_is_one_and_depends_on_each_argument():
    base = permutation(1, "train", 2, 100)
    assert sorted(base) == list(range(100))
    assert base.dtype == np.int64
    assert (base == permutation(1, "train", 2, 100)).all()
    for other in ((2, "train", 2, 100), (1, "train2", 2, 100), (1, "train", 3, 100)):
        assert (base != permutation(*other)).any()


def test_permutation_never_changes_between_versions():
    assert permutation(0, "train", 0, 8).tolist() == PINNED


def test_seeding_depends_on_each_argument():
    draws = set()
    for place in ((1, "a", 0, 0), (2, "a", 0, 0), (1, "b", 0, 0), (1, "a", 1, 0), (1, "a", 0, 1)):
        seed_sample(*place)
        first = draw()
        draw()
        seed_sample(*place)
        assert draw() == first
        draws.update(first)
    assert len(draws) == 15
