"""Seeds a run's generators alike on every rank and at every resume (G2). Imports no torch."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from optuna_fleet.accelerator import accelerator_of


def seed_run(seed: int, number: int) -> None:
    """Seed ``random`` and NumPy's global generator; torch's are seeded by `seed_torch`."""
    words = _words(seed, number)
    random.seed(int(words[0]))
    np.random.seed(words[1:2].view(np.uint32))


def seed_torch(seed: int, number: int) -> None:
    """Seed torch, on the CPU and every accelerator."""
    import torch

    torch.manual_seed(int(_words(seed, number)[2]))


def seed_gpu(device_type: str, seed: int, number: int, place: tuple[int, int, int]) -> None:
    """Seed the generator of this process's GPU, for one (loop, epoch, rank)."""
    words = np.random.SeedSequence([seed, number], spawn_key=place).generate_state(1, np.uint64)
    accelerator_of(device_type).module.manual_seed(int(words[0]))


def _words(seed: int, number: int) -> Any:
    # One independent word each, so that the three generators don't run in parallel.
    return np.random.SeedSequence([seed, number]).generate_state(3, np.uint64)
