"""Data sets for the tests, and memory that all processes forked later share."""

from __future__ import annotations

import mmap
import os
import random
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

NUM_COUNTERS = 4096
_memory = mmap.mmap(-1, 8 * NUM_COUNTERS)
COUNTS = np.frombuffer(_memory, dtype=np.int64)
"""How often ``dataset[index]`` ran, over all processes."""

SWITCH = NUM_COUNTERS - 1
"""Index of the counter by which tests steer the data sets below."""


def each_was_made(n: int, times: int) -> bool:
    """Whether each sample was made so often; one once more, to see whether it comes again."""
    return sorted(COUNTS[:n]) == [times] * (n - 1) + [times + 1]


class Made:
    """Sample i is what a function makes of i."""

    def __init__(self, make: Callable[[int], Any], n: int = 150) -> None:
        self.make, self.n = make, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class Counted:
    """Sample i is (16 times i, i); counts how often each is preprocessed."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        COUNTS[index] += 1
        return torch.full((16,), float(index)), index


class Augmented(Counted):
    """Sample i is (i, noise from each of the three generators)."""

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        COUNTS[index] += 1
        noise = [torch.rand(()).item(), np.random.rand(), random.random()]
        return index, torch.tensor(noise, dtype=torch.float64).repeat(40)


class Ragged(Counted):
    """Sample i is a tensor of length i % 3 + 1."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((index % 3 + 1,), index)


class Raising(Counted):
    """Raises on one sample as long as the switch is 0."""

    def __init__(self, n: int, at: int = 17) -> None:
        super().__init__(n)
        self.at = at

    def __getitem__(self, index: int) -> int:
        if index == self.at and not COUNTS[SWITCH]:
            raise ValueError("broken image")
        return index


class Deadly(Counted):
    """Kills its process on one sample, as often as the switch says."""

    def __init__(self, n: int, at: int = 17) -> None:
        super().__init__(n)
        self.at = at

    def __getitem__(self, index: int) -> int:
        if index == self.at and COUNTS[SWITCH]:
            COUNTS[SWITCH] -= 1
            os.kill(os.getpid(), signal.SIGKILL)
        return index


class Unloadable(Counted):
    """Can't be unpickled."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise OSError("no such disk")


GENERATORS = {
    "numpy": lambda: np.random.default_rng(),
    "philox": lambda: np.random.Generator(np.random.Philox(3)),
    "legacy": lambda: np.random.RandomState(0),
    "python": lambda: random.Random(),
    "torch": lambda: torch.Generator(),
}

LENGTH = 100_000
"""Of the array in a file, 64 bytes behind its beginning, that `tokens` is."""


def mapped(path, mode="r", **how):
    return np.memmap(path, dtype=np.int32, mode=mode, offset=64, **how)
