"""Random number generators of a trial: saved and restored with it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def rng_state() -> dict[str, Any]:
    """State of all generators, made of tensors and plain values.

    Returns:
        What ``set_rng_state`` takes; ``torch.load(weights_only=True)`` accepts it. "cuda" (the
        state of the current device) is there only when CUDA is in use.
    """
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (
            str(name),
            torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            int(position),
            int(has_gauss),
            float(gauss),
        ),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what ``rng_state`` returned; a CUDA state is skipped where there is no CUDA."""
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, words, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, words.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


@contextmanager
def own_randomness() -> Iterator[None]:
    """What modules draw from Python's and NumPy's generators is drawn again for the objective."""
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def generators_now() -> list[torch.Tensor]:
    """States of torch's generators, on the CPU and the current GPU, to compare and to set."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append(torch.cuda.get_rng_state())
    return states


def set_generators(states: list[torch.Tensor]) -> None:
    """Set what `generators_now` returned, unless it is so."""
    if are_alike(states, generators_now()):
        return
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])


def are_alike(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Whether two results of `generators_now` are equal."""
    return len(some) == len(others) and all(map(torch.equal, some, others))
