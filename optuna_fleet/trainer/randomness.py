"""Random number generators of a trial (G2): seeded, saved and restored with it.

Alike on every rank and at every resume. Imports torch where it is wanted only.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from optuna_fleet.accelerator import ACCELERATORS, accelerator_of, in_use


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


def rng_state() -> dict[str, Any]:
    """State of all generators, for `set_rng_state`; of tensors and plain values.

    That of the current device is there, under its type, only when it is in use.
    """
    import torch

    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    words = torch.from_numpy(np.asarray(keys, dtype=np.int64))
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (str(name), words, int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
    }
    if accelerator := in_use():
        state[accelerator.type] = accelerator.module.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what ``rng_state`` returned; that of a device is skipped where there is none."""
    import torch

    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, words, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, words.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    for each in ACCELERATORS:
        if each.type in state and each.module.is_available():
            each.module.set_rng_state(state[each.type])


@contextmanager
def own_randomness() -> Iterator[None]:
    """What is drawn is drawn again for the objective; takes about 0.1 ms."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)
