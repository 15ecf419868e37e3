"""Whether the next proposal must wait for trials under way, and why.

Optuna's samplers were made for one trial after the other. TPE, GP and random ones can propose any
number ahead; for the others it is said here what an early proposal would spoil.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from optuna.pruners import BasePruner, HyperbandPruner
from optuna.samplers import BaseSampler, BruteForceSampler, GridSampler, QMCSampler
from optuna.trial import FrozenTrial, TrialState

from optuna_fleet.sampler_bridge import compat


def is_limited(sampler: BaseSampler) -> bool:
    """Whether a sampler may have to wait at all."""
    sampler = compat.base_sampler(sampler)
    is_ordered = isinstance(sampler, QMCSampler | GridSampler | BruteForceSampler)
    return is_ordered or compat.has_generations(sampler)


def reason_to_wait(
    sampler: BaseSampler,
    pruner: BasePruner,
    trials: Sequence[FrozenTrial],
    mine: Collection[int],
    defined: Collection[int],
) -> str | None:
    """Return why the next proposal must wait for trials under way, or None.

    It never waits for trials of other processes, which may be dead.

    Args:
        sampler: The study's sampler.
        pruner: Its pruner.
        trials: All trials of the study.
        mine: Numbers of this call's trials under way.
        defined: Those of them that are known to have suggested all their parameters.
    """
    sampler = compat.base_sampler(sampler)
    running = [t for t in trials if t.number in mine and t.state is TrialState.RUNNING]
    if not running or _next_is_given(trials):
        return None
    if isinstance(sampler, QMCSampler):
        return _wait_for_space(trials, running, defined)
    if isinstance(sampler, GridSampler):
        return None if compat.grid_cells_left(sampler, trials) else "the last cells are under way"
    if isinstance(sampler, BruteForceSampler):
        return _wait_for_path(trials, running)
    if isinstance(pruner, HyperbandPruner):  # each bracket has generations of its own
        return None
    return _wait_for_generation(compat.generations(sampler, trials), trials, running)


def _next_is_given(trials: Sequence[FrozenTrial]) -> bool:
    """Whether the next trial is one from the queue, whose parameters are decided."""
    queued = next((t for t in trials if t.state is TrialState.WAITING), None)
    given = {"fixed_params", "grid_id"}
    return queued is not None and bool(queued.params or given & queued.system_attrs.keys())


def _wait_for_space(
    trials: Sequence[FrozenTrial], running: list[FrozenTrial], defined: Collection[int]
) -> str | None:
    """The first trial that is not from the queue defines the space that the sequence fills."""
    ended = (t for t in trials if t.state in (TrialState.COMPLETE, TrialState.PRUNED))
    if not all(map(compat.is_from_queue, ended)):
        return None
    first = [t for t in running if not compat.is_from_queue(t)]
    if not first or any(t.number in defined or t.intermediate_values for t in first):
        return None
    return "the first trial defines the space of the others"


def _wait_for_path(trials: Sequence[FrozenTrial], running: list[FrozenTrial]) -> str | None:
    """One trial at a time chooses its path through the tree, and only while one is free."""
    is_any_free, ends = compat.brute_force_tree(trials)
    if any(ends.get(trial.number, False) for trial in running):
        return "a trial is choosing its parameters"
    return None if is_any_free else "the last combinations are under way"


def _wait_for_generation(
    generations: tuple[str, int, Collection[TrialState]] | None,
    trials: Sequence[FrozenTrial],
    running: list[FrozenTrial],
) -> str | None:
    """A generation gets as many trials as it needs: further ones would teach it nothing."""
    if generations is None:
        return None
    key, size, states = generations
    done = [t.system_attrs[key] for t in trials if t.state in states and key in t.system_attrs]
    current = max(done, default=0)
    num_done = done.count(current)
    if num_done >= size:
        current, num_done = current + 1, 0
    members = [t for t in running if t.system_attrs.get(key, current) == current]
    # One with parameters and without a generation was not proposed by this sampler.
    num_running = sum(key in t.system_attrs or not t.params for t in members)
    if num_done + num_running < size:
        return None
    return f"a generation of {size} trials is completed before the next one begins"
