"""Samplers that look at no history: what they propose is a matter of seed and trial number alone.

Optuna's samplers draw from one generator, call after call; with several trials under way the order
of the calls is a matter of chance. Here each parameter of each trial has a generator of its own,
derived from the sampler's. That one is left as it is, so the same seed means the same in a later
call, on other devices, and where a trial that was interrupted goes on. A `RandomSampler` that has
drawn before, outside of a fleet, goes on as in Optuna: nothing says that it ever had a seed.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import (
    BaseSampler,
    BruteForceSampler,
    GridSampler,
    QMCSampler,
    RandomSampler,
)
from optuna.trial import FrozenTrial, TrialState

from optuna_fleet.sampler_bridge import compat, generators

_SPACE = "optuna_fleet:qmc_space"

# Two studies that are optimized at once may share a sampler.
_lock = threading.RLock()

# By a sampler's id, as it may not be hashable; see `_had_seed`.
_seeded: dict[int, bool] = {}


@contextmanager
def repeatable(study: optuna.Study, number: int, name: str = "") -> Iterator[None]:
    """Meanwhile the sampler proposes what depends on its seed, this trial and parameter only.

    Samplers that learn from other trials do as they always do.

    Args:
        study: The study whose sampler is asked.
        number: The trial's number.
        name: The parameter; empty where all are proposed at once.
    """
    sampler = compat.base_sampler(study.sampler)
    with ExitStack() as stack:
        if isinstance(sampler, QMCSampler | RandomSampler):
            stack.enter_context(_lock)
        if isinstance(sampler, QMCSampler):
            point = generators.qmc_point(
                sampler, lambda: _space(study, number), lambda: _position(study, number)
            )
            stack.enter_context(point)
            sampler = generators.independent_sampler(sampler)
        if isinstance(sampler, RandomSampler) and not generators.has_drawn(sampler):
            stack.enter_context(generators.derived_generator(sampler, number, name))
        yield


@contextmanager
def repeatable_cell(study: optuna.Study) -> Iterator[None]:
    """Meanwhile a grid gives the trial that is asked for a cell that depends on its number."""
    sampler = compat.base_sampler(study.sampler)
    if not isinstance(sampler, GridSampler):
        yield
        return
    with _lock, generators.cell_by_number(sampler):
        yield


def is_repeatable(sampler: BaseSampler) -> bool:
    """Whether what a sampler proposes for a trial is a matter of its seed and the number alone."""
    sampler = compat.base_sampler(sampler)
    if isinstance(sampler, QMCSampler):
        sampler = generators.independent_sampler(sampler)
    return isinstance(sampler, RandomSampler | GridSampler)


def note_space(study: optuna.Study, trial: FrozenTrial) -> None:
    """A trial has suggested its parameters; the first of a study by QMC defines the sequence.

    What it suggests later than that does not count: others may have begun.
    """
    if not isinstance(compat.base_sampler(study.sampler), QMCSampler) or not trial.distributions:
        return
    if not compat.is_from_queue(trial) and _first(study, compat.trials_of(study))[0] is None:
        record = {"first": trial.number, "names": list(trial.distributions)}
        compat.set_study_record(study, _SPACE, record)


def _first(
    study: optuna.Study, trials: Sequence[FrozenTrial]
) -> tuple[int | None, dict[str, BaseDistribution]]:
    """The trial that defines the space of the sequence, if there is one, and the space.

    None from the queue, several of which may be the first to suggest something.
    """
    stored = compat.study_records(study, _SPACE).values()
    records = {record["first"]: record["names"] for record in stored}
    for trial in trials:
        names = records.get(trial.number, ())
        has_ended = trial.state in (TrialState.COMPLETE, TrialState.PRUNED)
        if not records and has_ended and not compat.is_from_queue(trial):
            names = trial.distributions
        if names:
            return trial.number, {name: trial.distributions[name] for name in names}
    return None, {}


def _space(study: optuna.Study, number: int) -> dict[str, BaseDistribution]:
    """What the sequence proposes for a trial: nothing for the first, and those of the queue."""
    trials = compat.trials_of(study)
    first, space = _first(study, trials)
    return {} if number == first or compat.is_from_queue(trials[number]) else space


def _position(study: optuna.Study, number: int) -> int:
    """The trial's place in the sequence: those of the queue, and the first, have none."""
    trials = compat.trials_of(study)
    first, _ = _first(study, trials)
    earlier = (t for t in trials if t.number < number and t.number != first)
    return sum(not compat.is_from_queue(t) for t in earlier)


def reseed(sampler: BaseSampler) -> None:
    """Have a sampler that learns draw anew: its seed would propose again what it did at first."""
    if not is_repeatable(sampler):
        why_not_repeatable(sampler)  # notes whether it had a seed, before it has a generator
        sampler.reseed_rng()


def why_not_repeatable(sampler: BaseSampler) -> str | None:
    """What the seed of a sampler does not repeat with several trials under way, in words.

    None for a sampler without a seed, one that can be repeated, and one of the user's own making.
    """
    sampler = compat.base_sampler(sampler)
    if not _had_seed(sampler) or is_repeatable(sampler):
        return None
    if isinstance(sampler, BruteForceSampler):
        return (
            "its seed does not say which trial gets which combination, with several under way: "
            "that depends on how fast each is"
        )
    return (
        "its seed does not repeat this sweep, with several trials under way: it learns from those "
        "that have ended, and which have depends on how fast each is. FleetExecutor(max_trials=1) "
        "repeats"
    )


def _had_seed(sampler: BaseSampler) -> bool:
    """Whether it had one when it was first seen: later it has a generator in any case."""
    if id(sampler) not in _seeded:
        _seeded[id(sampler)] = generators.has_seed(sampler)
        weakref.finalize(sampler, _seeded.pop, id(sampler)).atexit = False
    return _seeded[id(sampler)]
