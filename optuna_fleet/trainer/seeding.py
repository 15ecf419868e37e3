"""Seeds a run's generators alike on every rank and at every resume (G2). Imports no torch."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np


def seed_run(seed: int, number: int) -> None:
    """Seed ``random``, NumPy's global generator and, if it is loaded, torch."""
    words = _words(seed, number)
    random.seed(int(words[0]))
    np.random.seed(words[1:2].view(np.uint32))
    if "torch" in sys.modules:
        seed_torch(seed, number)


def seed_torch(seed: int, number: int) -> None:
    """Seed torch, on the CPU and every CUDA device."""
    import torch

    torch.manual_seed(int(_words(seed, number)[2]))


def _words(seed: int, number: int) -> Any:
    # One independent word each, so that the three generators don't run in parallel.
    return np.random.SeedSequence([seed, number]).generate_state(3, np.uint64)
