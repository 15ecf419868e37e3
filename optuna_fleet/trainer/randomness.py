"""Random number generators of a trial: saved and restored with it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from optuna_fleet.accelerator import ACCELERATORS, in_use


def rng_state() -> dict[str, Any]:
    """State of all generators, made of tensors and plain values.

    Returns:
        What ``set_rng_state`` takes; ``torch.load(weights_only=True)`` accepts it. That of the
        current device is there, under its type, only when it is in use.
    """
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": _numpy_state(),
        "torch": torch.get_rng_state(),
    }
    if accelerator := in_use():
        state[accelerator.type] = accelerator.module.get_rng_state()
    return state


def _numpy_state() -> tuple[Any, ...]:
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    words = torch.from_numpy(np.asarray(keys, dtype=np.int64))
    return str(name), words, int(position), int(has_gauss), float(gauss)


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what ``rng_state`` returned; that of a device is skipped where there is none."""
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
