"""Random generators that data sets hold: copied into each process, and seeded there for a sample.

``self.rng = np.random.default_rng()`` would otherwise give other augmentation in each process.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np

Generator = Any
"""A ``random.Random``, NumPy's ``Generator`` or ``RandomState``, or torch's ``Generator``."""


def is_generator(value: Any) -> bool:
    """Returns whether a value is a random generator that can be seeded."""
    if isinstance(value, random.SystemRandom):
        return False
    if isinstance(value, (random.Random, np.random.RandomState, np.random.Generator)):
        return True
    torch = sys.modules.get("torch")  # not loaded: there is none of torch's
    return torch is not None and isinstance(value, torch.Generator) and value.device.type == "cpu"


def seed(generator: Generator, number: int) -> None:
    """Seeds a generator with a number below 2**64."""
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        bits.state = type(bits)(number).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed(number % (1 << 32))
    elif isinstance(generator, random.Random):
        generator.seed(number)
    else:
        generator.manual_seed(number)


def draw(generator: Generator) -> float:
    """Draws a number: equal for equal states."""
    if isinstance(generator, (random.Random, np.random.Generator)):
        return float(generator.random())
    if isinstance(generator, np.random.RandomState):
        return float(generator.random_sample())
    import torch

    return float(torch.rand((), dtype=torch.float64, generator=generator))
