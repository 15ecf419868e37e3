"""Random number generators of a trial: saved and restored with it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree


def rng_state() -> dict[str, Any]:
    """State of all generators, made of tensors and plain values.

    Returns:
        What ``set_rng_state`` takes; ``torch.load(weights_only=True)`` accepts it. "cuda" (the
        state of the current device) is there only when CUDA is in use.
    """
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": _numpy_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _numpy_state() -> tuple[Any, ...]:
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    words = torch.from_numpy(np.asarray(keys, dtype=np.int64))
    return str(name), words, int(position), int(has_gauss), float(gauss)


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what ``rng_state`` returned; a CUDA state is skipped where there is no CUDA."""
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, words, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, words.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


class TorchGenerators:
    """States of torch's generators, on the CPU and the current GPU, when this is made."""

    def __init__(self) -> None:
        self._states = self._now()

    @staticmethod
    def _now() -> list[torch.Tensor]:
        states = [torch.get_rng_state()]
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            states.append(torch.cuda.get_rng_state())
        return states

    def are_used(self) -> bool:
        """Whether anything was drawn from them since."""
        now = self._now()
        return len(now) != len(self._states) or not all(map(torch.equal, now, self._states))

    def restore(self) -> None:
        """Set them as they were."""
        if self.are_used():
            torch.set_rng_state(self._states[0])
            if len(self._states) > 1:
                torch.cuda.set_rng_state(self._states[1])


@contextmanager
def own_torch_randomness() -> Iterator[TorchGenerators]:
    """What is drawn from torch's generators is drawn again for the objective."""
    generators = TorchGenerators()
    try:
        yield generators
    finally:
        generators.restore()


@contextmanager
def own_randomness() -> Iterator[TorchGenerators]:
    """The same of Python's and NumPy's as well, which takes about 0.2 ms."""
    states = random.getstate(), np.random.get_state()
    try:
        with own_torch_randomness() as generators:
            yield generators
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def has_generator(values: Any) -> bool:
    """Whether one of the user's is among them, nested: from it nothing may be drawn once more."""
    return any(isinstance(leaf, torch.Generator) for leaf in pytree.tree_leaves(values))
