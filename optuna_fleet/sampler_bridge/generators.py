"""What Optuna's samplers draw from: more of its private names, tested as `compat` is."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, GridSampler, QMCSampler, RandomSampler
from optuna.samplers._lazy_random_state import LazyRandomState
from optuna.trial import FrozenTrial

_BLOCK = 624  # numbers that a Mersenne Twister makes at a time


@contextmanager
def derived_generator(sampler: BaseSampler, number: int, name: str) -> Iterator[None]:
    """Meanwhile a sampler with a generator draws from one for this trial and parameter.

    One without a seed has none, and gets a new one each time that it draws: studies that share it
    have nothing in common.
    """
    holder: LazyRandomState = sampler._rng  # type: ignore[attr-defined]
    if (own := holder._rng) is not None:
        state: Any = own.get_state()
        place = f"{state[2]} {number} {name}".encode()
        mark = hashlib.sha256(state[1].tobytes() + place).digest()
        entropy = np.random.SeedSequence(int.from_bytes(mark, "little"))
        holder._rng = np.random.RandomState(np.random.MT19937(entropy))
    try:
        yield
    finally:
        holder._rng = own


def has_drawn(sampler: RandomSampler) -> bool:
    """Whether it has a generator that is not as a seed leaves it: at its first block's end."""
    own = sampler._rng._rng
    return own is not None and own.get_state(legacy=False)["state"]["pos"] != _BLOCK


@contextmanager
def qmc_point(
    sampler: QMCSampler,
    space: Callable[[], dict[str, BaseDistribution]],
    position: Callable[[], int],
) -> Iterator[None]:
    """Meanwhile the sampler proposes the point at `position` in the sequence that fills `space`.

    The study's count of points goes on, for who continues without a fleet.
    """
    count = sampler._find_sample_id

    def find_sample_id(*args: Any) -> int:
        count(*args)
        return position()

    methods = {
        "infer_relative_search_space": lambda *_: space(),
        "_find_sample_id": find_sample_id,
    }
    with _replaced(sampler, methods):
        yield


@contextmanager
def cell_by_number(sampler: GridSampler) -> Iterator[None]:
    """Meanwhile a trial that is asked for gets a cell that depends on its number."""
    choose = sampler.before_trial

    def before_trial(study: optuna.Study, trial: FrozenTrial) -> None:
        with derived_generator(sampler, trial.number, ""):
            choose(study, trial)

    with _replaced(sampler, {"before_trial": before_trial}):
        yield


@contextmanager
def _replaced(sampler: BaseSampler, methods: dict[str, Callable[..., Any]]) -> Iterator[None]:
    vars(sampler).update(methods)
    try:
        yield
    finally:
        for method in methods:
            del vars(sampler)[method]


def independent_sampler(sampler: QMCSampler) -> BaseSampler:
    """The sampler of what is not in the sequence."""
    return sampler._independent_sampler


def has_seed(sampler: BaseSampler) -> bool:
    """Whether a sampler of Optuna's that has not been used yet was given a seed."""
    samplers = [sampler, *(v for v in vars(sampler).values() if isinstance(v, BaseSampler))]
    held = (value for one in samplers for value in vars(one).values())
    return any(isinstance(v, LazyRandomState) and v._rng is not None for v in held)
