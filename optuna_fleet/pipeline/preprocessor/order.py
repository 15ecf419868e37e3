"""The canonical order and the canonical randomness: of (seed, name, epoch, index) only."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Generator = Any
"""A ``random.Random``, NumPy's ``Generator`` or ``RandomState``, or torch's ``Generator``.

Those that data sets hold (``self.rng = np.random.default_rng()``) are seeded for each sample too,
or they would give other augmentation in each process.
"""


def is_generator(value: Any) -> bool:
    """Returns whether a value is a random generator that can be seeded."""
    if isinstance(value, random.SystemRandom):
        return False
    if isinstance(value, (random.Random, np.random.RandomState, np.random.Generator)):
        return True
    torch = sys.modules.get("torch")  # not loaded: there is none of torch's
    return torch is not None and isinstance(value, torch.Generator) and value.device.type == "cpu"


@lru_cache(maxsize=64)
def _stream(seed: int, name: str, epoch: int, purpose: str) -> hashlib.blake2b:
    return hashlib.blake2b(f"{purpose}\0{seed}\0{epoch}\0{name}".encode(), digest_size=32)


def permutation(seed: int, name: str, epoch: int, n: int) -> NDArray[np.int64]:
    """Returns the order of epoch ``epoch`` of data set ``name``, a permutation of ``range(n)``.

    From raw PCG64 output, which NumPy keeps stable between versions (``Generator.permutation`` is
    not promised to be), so that a sweep resumed after an upgrade sees the same order.
    """
    state = int.from_bytes(_stream(seed, name, epoch, "order").digest()[:16], "little")
    keys = np.random.PCG64(state).random_raw(n)
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)


def drawn(own: Sequence[Generator] = ()) -> tuple[float, ...]:
    """Draws from each of what `seed_sample` seeds: equal if they were where they are now."""
    import torch

    number = torch.rand((), dtype=torch.float64, device="cpu").item()
    return random.random(), np.random.random_sample(), number, *map(draw, own)


def watched(
    action: Callable[[], Any], seed: Callable[[], None], own: Sequence[Generator] = ()
) -> tuple[Any, bool]:
    """Returns what a function returns after ``seed()``, and whether it drew random numbers."""
    seed()
    before = drawn(own)
    seed()
    result = action()
    return result, drawn(own) != before


@contextmanager
def own_randomness() -> Iterator[None]:
    """What is seeded within, or told of workers, is as it was before, outside."""
    import torch
    from torch.utils.data._utils import worker

    info = worker._worker_info
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        worker._worker_info = info
        random.setstate(python)
        np.random.set_state(numpy)


def seed_sample(
    seed: int, name: str, epoch: int, index: int, own: Sequence[Generator] = ()
) -> int:
    """Seeds torch (CPU), NumPy's global generator, ``random`` and ``own`` for one sample.

    Called before ``dataset[index]``, so that augmentation depends on nothing else. About 20 us.

    Returns:
        What torch was seeded with.
    """
    stream = _stream(seed, name, epoch, "sample").copy()
    stream.update(index.to_bytes(8, "little"))
    return _seed(stream.digest(), own)


def seed_order(seed: int, name: str, epoch: int, own: Sequence[Generator] = ()) -> None:
    """Seeds the same for the order of an epoch, which a sampler of the user's draws."""
    _seed(_stream(seed, name, epoch, "sampler").digest(), own)


def _seed(digest: bytes, own: Sequence[Generator]) -> int:
    # A function-level import: modules that only need the order must not pay for torch.
    import torch

    # As a DataLoader's seeds, it fits into an int64: data sets make tensors and arrays of it.
    seed = int.from_bytes(digest[:8], "little") & ((1 << 63) - 1)
    # Not torch.manual_seed, which visits every accelerator back end: preprocessors use none.
    torch.default_generator.manual_seed(seed)
    np.random.seed(int.from_bytes(digest[8:12], "little"))
    random.seed(int.from_bytes(digest[16:24], "little"))
    for number, generator in enumerate(own, int.from_bytes(digest[24:], "little")):
        seed_generator(generator, number % (1 << 64))
    return seed


def seed_generator(generator: Generator, number: int) -> None:
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
