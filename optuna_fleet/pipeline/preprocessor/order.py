"""The canonical order and the canonical randomness: of (seed, name, epoch, index) only."""

from __future__ import annotations

import copy
import hashlib
import operator
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.pipeline.spec import DatasetSpec, Generator, PipelineSpec, Source

if TYPE_CHECKING:
    from numpy.typing import NDArray


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


def watched(
    action: Callable[[], Any], seed: Callable[[], None], own: Sequence[Generator] = ()
) -> tuple[Any, bool]:
    """Returns what a function returns after ``seed()``, and whether it drew random numbers."""
    seed()
    before = _states(own)
    result = action()
    return result, _states(own) != before


def _states(own: Sequence[Generator]) -> bytes:
    """What `seed_sample` sets, as bytes.

    Not the generators themselves: not all that are found in a data set can be pickled by name.
    """
    import torch

    def state(of: Generator) -> Any:
        if isinstance(of, random.Random):
            return of.getstate()
        if isinstance(of, np.random.Generator):
            return of.bit_generator.state
        found = of.get_state()
        return found.numpy() if isinstance(found, torch.Tensor) else found  # as bytes, exactly

    shared = random.getstate(), np.random.get_state()
    return pickle.dumps([*shared, *map(state, (torch.default_generator, *own))])


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


def epoch_order(source: Source, spec: DatasetSpec, seed: int, epoch: int) -> NDArray[np.int64]:
    """Returns the order of an epoch of a data set, of shape [num_samples]; see above."""
    sampler = source.samplers.get(spec.name)
    if sampler is None:
        return permutation(seed, spec.name, epoch, spec.num_samples)
    return _numbered(_drawn(source, spec, seed, epoch, sampler), spec.length)


def check_samplers(source: Source, spec: PipelineSpec) -> None:
    """Draws an epoch twice from each of the user's samplers."""
    for name in source.samplers:
        dataset = spec.dataset(name)
        first, again = (epoch_order(source, dataset, spec.seed, 0) for _ in range(2))
        if not np.array_equal(first, again):
            raise FleetConfigError(
                f"The sampler of data set {name!r} draws one epoch differently each time, but "
                "all processes have to draw the same. Let it take its random numbers from "
                "torch's, NumPy's or Python's global functions, which are seeded for each epoch, "
                "from a generator that it keeps, or from the number given to its `set_epoch`."
            )


def _drawn(
    source: Source, spec: DatasetSpec, seed: int, epoch: int, sampler: Any
) -> NDArray[np.int64]:
    # A copy: what it changes in itself must not decide on the next epoch that is drawn here.
    known = {id(each): each for dataset in source.datasets.values() for each in _within(dataset)}
    sampler = copy.deepcopy(sampler, memo := dict(known))
    copies = [memo[id(each)] for each in source.generators if id(each) in memo]
    with own_randomness():
        seed_order(seed, spec.name, epoch, [*source.generators, *copies])
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        drawn = list(islice(sampler, spec.num_samples + 1))
    return _checked(drawn, spec)


def _within(dataset: Any) -> Iterator[Any]:
    """The data set, and those it is made of."""
    yield dataset
    inner = getattr(dataset, "datasets", None) or [getattr(dataset, "dataset", None)]
    for each in inner if isinstance(inner, (list, tuple)) else ():
        if each is not None:
            yield from _within(each)


def _checked(drawn: list[Any], spec: DatasetSpec) -> NDArray[np.int64]:
    whose = f"The sampler of data set {spec.name!r}"
    if len(drawn) != spec.num_samples:
        more = "more" if len(drawn) > spec.num_samples else f"{len(drawn)}"
        raise FleetConfigError(
            f"{whose} draws {more} samples in an epoch, but its len() is {spec.num_samples}. They "
            "must be the same, in each epoch."
        )
    try:
        indices = np.fromiter(map(operator.index, drawn), np.int64, len(drawn))
    except TypeError:
        odd = next(each for each in drawn if not hasattr(each, "__index__"))
        raise FleetConfigError(
            f"{whose} draws {odd!r:.60}, but must draw single indices, of type int: each trial "
            "has a batch size of its own."
        ) from None
    low, high = int(indices.min()), int(indices.max())
    if low < 0 or high >= spec.length:
        raise FleetConfigError(
            f"{whose} draws index {low if low < 0 else high}, but the data set has "
            f"{spec.length} samples: indices are from 0 to {spec.length - 1}."
        )
    return indices


def _numbered(indices: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    order = np.argsort(indices, kind="stable")
    begins = np.flatnonzero(np.diff(indices[order], prepend=-1))
    runs = np.diff(begins, append=len(indices))
    times = np.arange(len(indices)) - np.repeat(begins, runs)
    numbered = np.empty_like(indices)
    numbered[order] = indices[order] + times * length
    return numbered


class Surroundings:
    """Seeds, ``set_epoch`` and ``get_worker_info()``, as under a DataLoader with one worker.

    One, whatever the number of preprocessors: which of them makes a sample is of the moment.
    """

    def __init__(self, source: Source, spec: PipelineSpec) -> None:
        self._source = source
        self._seed = spec.seed
        self._told = {
            name: [each for each in _torch_parts(dataset) if hasattr(each, "set_epoch")]
            for name, dataset in source.datasets.items()
        }
        self._epochs: dict[int, int] = {}  # by id of what was told of it

    def begin(self, name: str, epoch: int, place: int) -> None:
        """Sets all of them for a sample, which is made next."""
        from torch.utils.data._utils import worker

        generators = self._source.generators
        for each in self._told[name]:
            if self._epochs.get(id(each)) != epoch:  # several names may have it in them
                seed_order(self._seed, "", epoch, generators)
                self._epochs.pop(id(each), None)
                each.set_epoch(epoch)
                self._epochs[id(each)] = epoch
        seed = seed_sample(self._seed, name, epoch, place, generators)
        dataset = self._source.datasets[name]
        worker._worker_info = worker.WorkerInfo(id=0, num_workers=1, seed=seed, dataset=dataset)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """What `begin` sets within is as it was before, outside: in a process of the user's."""
        self._epochs.clear()  # he may have called set_epoch himself
        with own_randomness():
            yield


def _torch_parts(dataset: Any) -> Iterator[Any]:
    """The data set, and those it is made of by torch's classes."""
    from torch.utils.data import ConcatDataset, Subset

    yield dataset
    if type(dataset) is Subset:
        yield from _torch_parts(dataset.dataset)
    elif type(dataset) is ConcatDataset:
        for each in dataset.datasets:
            yield from _torch_parts(each)
