"""Every private name of Optuna that we use, in one place; tested with all supported versions."""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Callable, Collection, Sequence
from types import SimpleNamespace
from typing import Any

import optuna
from optuna.progress_bar import _ProgressBar
from optuna.samplers import BaseSampler
from optuna.samplers._brute_force import _TreeNode
from optuna.samplers._ga import BaseGASampler
from optuna.storages._heartbeat import (
    BaseHeartbeat,
    BaseHeartbeatThread,
    get_heartbeat_thread,
    is_heartbeat_enabled,
)
from optuna.storages.journal import JournalFileBackend
from optuna.study._optimize import _log_failed_trial
from optuna.study._tell import _tell_with_warning
from optuna.trial import FrozenTrial, TrialState

# Optuna logs each trial's end under this name; users filter and tests look for it.
logger = optuna.logging.get_logger("optuna.study._optimize")

# Below Optuna's root logger, so that its handlers and verbosity hold for our lines too.
fleet_logger = optuna.logging.get_logger("optuna.fleet")

ProgressBar = _ProgressBar


def show_beside_bar(bar: ProgressBar, text: str) -> None:
    """Show a few words behind the bar, where it has nothing there itself."""
    if bar._is_valid and bar._timeout is None:
        bar._progress_bar.set_postfix_str(text)


def enter_loop(study: optuna.Study) -> None:
    """Mark this thread as optimizing `study`.

    Raises:
        RuntimeError: It already is.
    """
    if study._thread_local.in_optimize_loop:
        raise RuntimeError("Nested invocation of `Study.optimize` method isn't allowed.")
    study._stop_flag = False
    study._thread_local.in_optimize_loop = True


def leave_loop(study: optuna.Study) -> None:
    """Undo `enter_loop` and close this thread's storage session."""
    study._thread_local.in_optimize_loop = False
    study._storage.remove_session()


def take_back_stop(study: optuna.Study) -> None:
    """Forget that the study was to stop."""
    study._stop_flag = False


def is_stopped(study: optuna.Study) -> bool:
    """Whether `study.stop()` was called in this loop."""
    return study._stop_flag


def storage_of(study: optuna.Study) -> optuna.storages.BaseStorage:
    """The study's storage."""
    return study._storage


def set_storage(study: optuna.Study, storage: Any) -> None:
    """Have the study use another object as its storage."""
    study._storage = storage


def journal_file_of(study: optuna.Study) -> str | None:
    """The file of a journal storage."""
    storage: Any = getattr(study._storage, "itself", study._storage)
    backend = getattr(storage, "_backend", None)
    return os.path.abspath(backend._file_path) if isinstance(backend, JournalFileBackend) else None


def names_of(study: optuna.Study) -> dict[int, str]:
    """What an objective must not take a copy of, by `id`: the study and its storage."""
    itself = getattr(study._storage, "itself", study._storage)
    return {id(study): "study", id(study._storage): "storage", id(itself): "storage"}


def id_of(trial: optuna.Trial) -> int:
    """The trial's id in its storage (users see its number)."""
    return trial._trial_id


def frozen(study: optuna.Study, trial: optuna.Trial) -> FrozenTrial:
    """The trial as the storage has it now."""
    return study._storage.get_trial(trial._trial_id)


def checked_report(value: Any, step: Any, *, num_objectives: int) -> tuple[float, int]:
    """What `Trial.report` would store; or what it raises, found out without a study."""
    stored: list[tuple[float, int]] = []
    trial: Any = SimpleNamespace(
        study=SimpleNamespace(directions=range(num_objectives)),
        storage=SimpleNamespace(
            set_trial_intermediate_value=lambda _, step, value: stored.append((value, step))
        ),
        _trial_id=0,
        _cached_frozen_trial=SimpleNamespace(intermediate_values={}),
    )
    optuna.Trial.report(trial, value, step)
    return stored[0]


def fail_stale_trials(study: optuna.Study) -> None:
    """Fail trials whose heartbeat stopped, if the storage has heartbeats."""
    if is_heartbeat_enabled(study._storage):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            optuna.storages.fail_stale_trials(study)


Heartbeat = BaseHeartbeatThread
HeartbeatStorage = BaseHeartbeat


def heartbeat(study: optuna.Study, trial: optuna.Trial) -> Heartbeat:
    """A thread, not yet started, that records heartbeats of the trial until it is joined."""
    return get_heartbeat_thread(trial._trial_id, study._storage)


def forget_cached_trials(study: optuna.Study) -> None:
    """Drop Optuna's cache of all trials, which lasts as long as one trial: others have changed."""
    study._thread_local.cached_all_trials = None


def return_to_queue(study: optuna.Study, trial: optuna.Trial) -> None:
    """Return an asked trial to the study: WAITING, with its parameters; the next `ask` gets it."""
    study._storage.set_trial_state_values(trial._trial_id, TrialState.WAITING)
    # A storage in memory looks for WAITING trials only from where it has found the first one.
    first = getattr(study._storage, "_prev_waiting_trial_number", {})
    first[study._study_id] = min(trial.number, first.get(study._study_id, trial.number))
    forget_cached_trials(study)


def trials_of(study: optuna.Study, *states: TrialState) -> list[FrozenTrial]:
    """The study's trials in these states, or all; not to be changed."""
    return study._storage.get_all_trials(study._study_id, deepcopy=False, states=states or None)


def trial_of(study: optuna.Study, frozen: FrozenTrial) -> optuna.Trial:
    """A trial of the study that some process has asked for, to go on with it.

    What it was given before is suggested to it again. From now on it has a heartbeat, if the
    storage has any, or it would be taken for stale before its new one begins.
    """
    if is_heartbeat_enabled(study._storage):
        study._storage.record_heartbeat(frozen._trial_id)  # type: ignore[attr-defined]
    return optuna.Trial(study, frozen._trial_id)


def bare_trial(study: optuna.Study, frozen: FrozenTrial) -> Any:
    """What says which trial is meant; to make an `optuna.Trial` would make its sampler begin."""
    return SimpleNamespace(study=study, storage=study._storage, _trial_id=frozen._trial_id)


def ask_marked(study: optuna.Study, mark: Callable[[int | None], tuple[str, Any]]) -> optuna.Trial:
    """`Study.ask` for a trial that is never RUNNING without a system attribute of ours.

    Args:
        study: The study.
        mark: From the trial's number, None if it is not known yet, to the attribute.
    """
    forget_cached_trials(study)
    trial_id = _pop_waiting(study, mark)
    if trial_id is None:
        template = optuna.create_trial(state=TrialState.RUNNING, system_attrs=dict([mark(None)]))
        trial_id = study._storage.create_new_trial(study._study_id, template_trial=template)
    return optuna.Trial(study, trial_id)


def _pop_waiting(study: optuna.Study, mark: Callable[[int | None], tuple[str, Any]]) -> int | None:
    for trial in trials_of(study, TrialState.WAITING):
        # Another process may take it at any moment.
        with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
            key, value = mark(trial.number)
            study._storage.set_trial_system_attr(trial._trial_id, key, value)
            if study._storage.set_trial_state_values(trial._trial_id, TrialState.RUNNING):
                return trial._trial_id
            study._storage.set_trial_system_attr(trial._trial_id, key, None)
    return None


def set_trial_record(
    study: optuna.Study, trial: optuna.Trial | FrozenTrial, key: str, value: Any
) -> None:
    """Store a record of ours with the trial, unless someone else has told it as finished."""
    with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
        study._storage.set_trial_system_attr(trial._trial_id, key, value)


def set_study_record(study: optuna.Study, key: str, value: Any) -> None:
    """Store a record of ours with the study."""
    study._storage.set_study_system_attr(study._study_id, key, value)


def try_study_record(study: optuna.Study, key: str, value: Any) -> None:
    """Store a record that may be missing, without waiting for a storage that is gone."""
    storage: Any = getattr(study._storage, "itself", study._storage)
    with contextlib.suppress(Exception):
        storage.set_study_system_attr(study._study_id, key, value)


def study_records(study: optuna.Study, prefix: str) -> dict[str, Any]:
    """Our records of the study whose keys begin like this, by what follows in their keys."""
    records = study._storage.get_study_system_attrs(study._study_id)
    return {key[len(prefix) :]: value for key, value in records.items() if key.startswith(prefix)}


def tell(
    study: optuna.Study,
    trial: optuna.Trial,
    value: float | Sequence[float] | None,
    state: TrialState | None,
) -> tuple[TrialState, list[float] | None, str | None]:
    """`Study.tell` as in `Study.optimize`: bad values fail the trial; described, not raised."""
    several = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    texts = [part for part in several if isinstance(part, str)] if state is None else []
    if texts:  # for "0.5" Optuna raises, and the trial stays RUNNING
        value, state = None, TrialState.FAIL
    try:
        state, values, problem = _tell_with_warning(
            study=study, trial=trial, value_or_values=value, state=state, suppress_warning=True
        )
    except ValueError as error:  # for one that has ended Optuna has no type of its own here
        if str(error) != f"Cannot tell a {frozen(study, trial).state.name} trial.":
            raise
        raise optuna.exceptions.UpdateFinishedTrialError(str(error)) from error
    if texts:
        problem = f"The value {texts[0]!r} could not be cast to float"
    return state, None if values is None else list(values), problem


def log_completed(study: optuna.Study, trial: optuna.Trial, values: list[float]) -> None:
    """Optuna's line on a completed trial."""
    study._log_completed_trial(values, trial.number, trial.params)


def log_failed(
    trial: optuna.Trial, message: str, value: Any, error: BaseException | None = None
) -> None:
    """Optuna's two lines on a failed trial, with the traceback of where it was raised."""
    if error is not None and error.__traceback__ is None:  # elsewhere, as its cause tells
        error = error.__cause__ or error
    exc_info = None if error is None else (type(error), error, error.__traceback__)
    _log_failed_trial(trial.number, trial.params, message, exc_info, value)


# -- samplers -------------------------------------------------------------------------------------


def base_sampler(sampler: BaseSampler) -> BaseSampler:
    """The sampler that decides what is not fixed."""
    while isinstance(sampler, optuna.samplers.PartialFixedSampler):
        sampler = sampler._base_sampler
    return sampler


def is_from_queue(trial: FrozenTrial) -> bool:
    """Whether the user named parameters of the trial (`enqueue_trial`)."""
    return "fixed_params" in trial.system_attrs


def is_unsampled(trial: optuna.Trial, name: str) -> bool:
    """Whether suggesting this parameter makes the sampler propose parameters for the trial."""
    known = trial._cached_frozen_trial.distributions.keys() | trial._fixed_params.keys()
    return trial._relative_params is None and name not in known


def given_values(study: optuna.Study, trial: optuna.Trial, name: str) -> list[Any]:
    """What users named for a parameter outside the objective: in the queue, or to a sampler."""
    values = [trial._fixed_params[name]] if name in trial._fixed_params else []
    sampler = study.sampler
    while isinstance(sampler, optuna.samplers.PartialFixedSampler):
        values += [sampler._fixed_params[name]] if name in sampler._fixed_params else []
        sampler = sampler._base_sampler
    if isinstance(sampler, optuna.samplers.GridSampler):
        values += sampler._search_space.get(name, ())
    return values


def refix(trial: optuna.Trial, name: str, change: Callable[[Any], Any]) -> None:
    """Change the value from the queue that the trial will be suggested, if there is one."""
    if name in trial._fixed_params:
        changed = change(trial._fixed_params[name])
        trial._fixed_params = {**trial._fixed_params, name: changed}


def internal_value(study: optuna.Study, trial: optuna.Trial, name: str) -> float:
    """A parameter as the storage has it: of a categorical one, the choice's position."""
    return study._storage.get_trial_param(trial._trial_id, name)


def is_bound_to_thread(study: optuna.Study) -> bool:
    """Whether each thread would see a storage of its own: SQLite in memory."""
    storage = getattr(study._storage, "_backend", study._storage)
    url = str(getattr(storage, "url", ""))
    return url.startswith("sqlite") and (":memory:" in url or url.endswith("//"))


def sample(study: optuna.Study, trial: optuna.Trial) -> None:
    """Have the sampler propose parameters for the trial, which gets them when it asks."""
    study._thread_local.in_optimize_loop = True  # whichever thread this is
    forget_cached_trials(study)
    trial.relative_params  # noqa: B018 - sampled at the first look


def has_generations(sampler: BaseSampler) -> bool:
    """Whether it learns from whole generations of trials."""
    return isinstance(sampler, BaseGASampler | optuna.samplers.CmaEsSampler)


def generations(
    sampler: BaseSampler, trials: Sequence[FrozenTrial]
) -> tuple[str, int, Collection[TrialState]] | None:
    """How a sampler marks the generation of a trial, the size of one, and who is counted in it.

    None for samplers without generations, and while the size is unknown.
    """
    if isinstance(sampler, BaseGASampler) and sampler.population_size:
        return sampler._get_generation_key(), sampler.population_size, (TrialState.COMPLETE,)
    if not isinstance(sampler, optuna.samplers.CmaEsSampler):
        return None
    states = (TrialState.COMPLETE, *[TrialState.PRUNED] * sampler._consider_pruned_trials)
    size = sampler._popsize or _default_popsize([t for t in trials if t.state in states])
    return (sampler._attr_key_generation, size, states) if size else None


def _default_popsize(trials: list[FrozenTrial]) -> int | None:
    """That of CMA-ES for the numbers that all trials have."""
    space = optuna.search_space.intersection_search_space(trials)
    categorical = optuna.distributions.CategoricalDistribution
    dim = sum(not (d.single() or isinstance(d, categorical)) for d in space.values())
    return 4 + math.floor(3 * math.log(dim)) if dim else None


def grid_cells_left(sampler: optuna.samplers.GridSampler, trials: Sequence[FrozenTrial]) -> bool:
    """Whether a cell of the grid is neither done nor under way."""
    taken = {
        trial.system_attrs["grid_id"]
        for trial in trials
        if trial.state is not TrialState.WAITING
        and "grid_id" in trial.system_attrs
        and sampler._same_search_space(trial.system_attrs["search_space"])
    }
    return len(taken) < len(sampler._all_grids)


def is_for_want_of_cell(error: Exception, sampler: BaseSampler, trial: FrozenTrial) -> bool:
    """Whether a grid's `after_trial` failed only because the trial, from the queue, has no cell.

    It looks for the cell when a single one is left, which is often so with several trials under
    way. There is nothing that it would have had to do.
    """
    return (
        isinstance(base_sampler(sampler), optuna.samplers.GridSampler)
        and isinstance(error, KeyError)
        and error.args == ("grid_id",)
        and "grid_id" not in trial.system_attrs
    )


def brute_force_tree(trials: Sequence[FrozenTrial]) -> tuple[bool, dict[int, bool]]:
    """What is known of the space that brute force searches.

    Returns:
        Whether a combination is known that is neither done nor under way; and of each running
        trial, by number, whether it stands where others went on to further parameters.
    """
    tree = _TreeNode()
    begun = [trial for trial in trials if trial.state is not TrialState.WAITING]
    try:
        optuna.samplers.BruteForceSampler._populate_tree(tree, begun, {})
    except ValueError:  # the space has changed: there is no telling
        return True, {}
    running = (trial for trial in begun if trial.state is TrialState.RUNNING)
    return tree.is_any_expandable(True), {t.number: _is_midway(tree, t) for t in running}


def _is_midway(tree: _TreeNode, trial: FrozenTrial) -> bool:
    node: Any = tree
    for name, distribution in trial.distributions.items():
        children = getattr(node, "children", None) or {}
        node = children.get(distribution.to_internal_repr(trial.params[name]))
    return bool(getattr(node, "children", None))
