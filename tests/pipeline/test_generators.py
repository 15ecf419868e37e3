"""Data sets with random generators of their own: the same augmentation in every process."""

from __future__ import annotations

import random

import numpy as np
from pipeline_datasets import GENERATORS
from pipeline_harness import draw

from optuna_fleet.pipeline.preprocessor.order import is_generator, seed_generator


def test_what_can_be_seeded() -> None:
    for make in GENERATORS.values():
        generator = make()
        assert is_generator(generator)
        drawn = []
        for number in (0, 2**64 - 1, 0):
            seed_generator(generator, number)
            drawn.append(draw(generator))
        assert drawn[0] == drawn[2] != drawn[1]
    assert not any(map(is_generator, (random.SystemRandom(), 3, random, np.random.PCG64(0))))
