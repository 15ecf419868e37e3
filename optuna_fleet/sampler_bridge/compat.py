"""Every private name of Optuna that we use, in one place; tested with all supported versions."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import optuna
from optuna.progress_bar import _ProgressBar
from optuna.samplers import BaseSampler, BruteForceSampler, GridSampler, PartialFixedSampler
from optuna.samplers._brute_force import _TreeNode
from optuna.study._tell import _tell_with_warning
from optuna.trial import FrozenTrial, TrialState

# Optuna logs each trial's end under this name; users filter and tests look for it.
logger = optuna.logging.get_logger("optuna.study._optimize")

# Below Optuna's root logger, so that its handlers and verbosity hold for our lines too.
fleet_logger = optuna.logging.get_logger("optuna.fleet")

ProgressBar = _ProgressBar
Mark = Callable[[int | None], tuple[str, Any]]


def show_beside_bar(bar: ProgressBar, text: str) -> None:
    """Show a few words behind the bar, where it has nothing there itself."""
    if bar._is_valid and bar._timeout is None:
        bar._progress_bar.set_postfix_str(text)


# -- the loop -------------------------------------------------------------------------------------


def _of_this_thread(study: optuna.Study) -> Any:
    return study._thread_local


def enter_loop(study: optuna.Study) -> None:
    """Mark this thread as optimizing `study`.

    Raises:
        RuntimeError: It already is.
    """
    if _of_this_thread(study).in_optimize_loop:
        raise RuntimeError("Nested invocation of `Study.optimize` method isn't allowed.")
    take_back_stop(study)
    _of_this_thread(study).in_optimize_loop = True


def leave_loop(study: optuna.Study) -> None:
    """Undo `enter_loop` and close this thread's storage session."""
    _of_this_thread(study).in_optimize_loop = False
    storage_of(study).remove_session()


def take_back_stop(study: optuna.Study) -> None:
    """Forget that the study was to stop."""
    study._stop_flag = False


def is_stopped(study: optuna.Study) -> bool:
    """Whether `study.stop()` was called in this loop."""
    return study._stop_flag


def forget_cached_trials(study: optuna.Study) -> None:
    """Drop Optuna's cache of all trials, which lasts as long as one trial: others have changed."""
    _of_this_thread(study).cached_all_trials = None


# -- the storage ----------------------------------------------------------------------------------


def storage_of(study: optuna.Study) -> Any:
    """The study's storage: a `BaseStorage`, and perhaps one that takes heartbeats."""
    return study._storage


def id_of(trial: optuna.Trial | FrozenTrial) -> int:
    """The trial's id in its storage (users see its number)."""
    return trial._trial_id


def _id_of_study(study: optuna.Study) -> int:
    return study._study_id


def names_of(study: optuna.Study) -> dict[int, str]:
    """What an objective must not take a copy of, by `id`: the study and its storage."""
    return {id(study): "study", id(storage_of(study)): "storage"}


def is_bound_to_thread(study: optuna.Study) -> bool:
    """Whether each thread would see a storage of its own: SQLite in memory."""
    storage = getattr(storage_of(study), "_backend", storage_of(study))
    url = str(getattr(storage, "url", ""))
    return url.startswith("sqlite") and (":memory:" in url or url.endswith("//"))


def frozen(study: optuna.Study, trial: optuna.Trial) -> FrozenTrial:
    """The trial as the storage has it now."""
    return storage_of(study).get_trial(id_of(trial))  # type: ignore[no-any-return]


def trials_of(study: optuna.Study, *states: TrialState) -> list[FrozenTrial]:
    """The study's trials in these states, or all; not to be changed."""
    storage, study_id = storage_of(study), _id_of_study(study)
    return storage.get_all_trials(study_id, deepcopy=False, states=states or None)  # type: ignore[no-any-return]


def trial_of(study: optuna.Study, trial_id: int) -> optuna.Trial:
    """A trial that was taken, or that some process has asked for, to go on with it.

    What it was given before is suggested to it again.
    """
    return optuna.Trial(study, trial_id)


def bare_trial(study: optuna.Study, trial: FrozenTrial) -> Any:
    """What says which trial is meant; to make an `optuna.Trial` would make its sampler begin."""
    return SimpleNamespace(study=study, storage=storage_of(study), _trial_id=id_of(trial))


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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        optuna.storages.fail_stale_trials(study)


def take_trial(study: optuna.Study, mark: Mark | None) -> int:
    """Take the first trial of the queue, or a new one, as `Study.ask` does; return its id.

    Args:
        study: The study.
        mark: From the trial's number, None if it is not known yet, to a system attribute that it
            has from the moment when it is RUNNING.
    """
    forget_cached_trials(study)
    storage = storage_of(study)
    for trial in trials_of(study, TrialState.WAITING):
        # Another process may take it at any moment.
        with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
            set_mark = mark and mark(trial.number)
            if set_mark:
                storage.set_trial_system_attr(id_of(trial), *set_mark)
            if storage.set_trial_state_values(id_of(trial), TrialState.RUNNING):
                return id_of(trial)
            if set_mark:
                storage.set_trial_system_attr(id_of(trial), set_mark[0], None)
    marks = dict([mark(None)]) if mark else None
    template = optuna.create_trial(state=TrialState.RUNNING, system_attrs=marks)
    return storage.create_new_trial(_id_of_study(study), template_trial=template)  # type: ignore[no-any-return]


def return_to_queue(study: optuna.Study, trial: optuna.Trial) -> None:
    """Return an asked trial to the study: WAITING, with its parameters; the next `ask` gets it."""
    storage, study_id = storage_of(study), _id_of_study(study)
    storage.set_trial_state_values(id_of(trial), TrialState.WAITING)
    # A storage in memory looks for WAITING trials only from where it has found the first one.
    first = getattr(storage, "_prev_waiting_trial_number", {})
    first[study_id] = min(trial.number, first.get(study_id, trial.number))
    forget_cached_trials(study)


def set_trial_record(
    study: optuna.Study, trial: optuna.Trial | FrozenTrial, key: str, value: Any
) -> None:
    """Store a record of ours with the trial, unless someone else has told it as finished."""
    with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
        storage_of(study).set_trial_system_attr(id_of(trial), key, value)


def set_study_record(study: optuna.Study, key: str, value: Any) -> None:
    """Store a record of ours with the study."""
    storage_of(study).set_study_system_attr(_id_of_study(study), key, value)


def study_records(study: optuna.Study, prefix: str) -> dict[str, Any]:
    """Our records of the study whose keys begin like this, by what follows in their keys."""
    records = storage_of(study).get_study_system_attrs(_id_of_study(study))
    return {key[len(prefix) :]: value for key, value in records.items() if key.startswith(prefix)}


# -- how a trial ends -----------------------------------------------------------------------------


def tell(
    study: optuna.Study,
    trial: optuna.Trial,
    value: float | Sequence[float] | None,
    state: TrialState | None,
    *,
    is_repeated: bool,
) -> tuple[TrialState, list[float] | None, str | None]:
    """`Study.tell` as in `Study.optimize`: bad values fail the trial; described, not raised.

    If it `is_repeated`, as the storage was gone, the trial may have been told meanwhile: then its
    sampler is, which Optuna does before.

    Raises:
        UpdateFinishedTrialError: It has ended.
        Exception: What its sampler raises, once the trial was told.
    """
    if (now := frozen(study, trial)).state.is_finished():
        if not is_repeated:
            text = f"Cannot tell a {now.state.name} trial."
            raise optuna.exceptions.UpdateFinishedTrialError(text)
        study.sampler.after_trial(study, now, now.state, now.values)
        return now.state, now.values, None
    several = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    texts = [part for part in several if isinstance(part, str)] if state is None else []
    if texts:  # for "0.5" Optuna raises, and the trial stays RUNNING
        value, state = None, TrialState.FAIL
    state, values, problem = _tell_with_warning(
        study=study, trial=trial, value_or_values=value, state=state, suppress_warning=True
    )
    if texts:
        problem = f"The value {texts[0]!r} could not be cast to float"
    return state, None if values is None else list(values), problem


def log_completed(study: optuna.Study, trial: optuna.Trial, values: list[float]) -> None:
    """Optuna's line on a completed trial."""
    study._log_completed_trial(values, trial.number, trial.params)


def log_failed(
    trial: optuna.Trial, message: str | None, value: Any, error: BaseException | None = None
) -> None:
    """Optuna's two lines on a failed trial, with the traceback of where it was raised."""
    if error is not None and error.__traceback__ is None:  # elsewhere, as its cause tells
        error = error.__cause__ or error
    logger.warning(
        f"Trial {trial.number} failed with parameters: {trial.params} because of the following "
        f"error: {message}.",
        exc_info=None if error is None else (type(error), error, error.__traceback__),
    )
    logger.warning(f"Trial {trial.number} failed with value {value!r}.")


# -- samplers -------------------------------------------------------------------------------------


def base_sampler(sampler: BaseSampler) -> BaseSampler:
    """The sampler that decides what is not fixed."""
    while isinstance(sampler, PartialFixedSampler):
        sampler = sampler._base_sampler
    return sampler


def is_unsampled(study: optuna.Study, trial: optuna.Trial, name: str) -> bool:
    """Whether suggesting this parameter makes the sampler propose parameters for the trial."""
    if trial.relative_search_space is not None:
        return False
    known = frozen(study, trial)
    return name not in known.params and name not in known.system_attrs.get("fixed_params", ())


def sample(study: optuna.Study, trial: optuna.Trial) -> None:
    """Have the sampler propose parameters for the trial, which gets them when it asks."""
    _of_this_thread(study).in_optimize_loop = True  # whichever thread this is
    forget_cached_trials(study)
    trial.relative_params  # noqa: B018 - sampled at the first look


def has_none_left(study: optuna.Study) -> bool:
    """Whether a grid, or brute force, has all under way that is left: more would be twice."""
    sampler = base_sampler(study.sampler)
    if not isinstance(sampler, GridSampler | BruteForceSampler):
        return False
    trials = trials_of(study)
    queued = next((t for t in trials if t.state is TrialState.WAITING), None)
    given = {"fixed_params", "grid_id"}
    if queued is not None and (queued.params or given & queued.system_attrs.keys()):
        return False
    if isinstance(sampler, GridSampler):
        running = (trial for trial in trials if trial.state is TrialState.RUNNING)
        cells = {trial.system_attrs.get("grid_id") for trial in running}
        return cells.issuperset(sampler._get_unvisited_grid_ids(study))
    tree, begun = _TreeNode(), [t for t in trials if t.state is not TrialState.WAITING]
    try:
        sampler._populate_tree(tree, begun, {})
    except ValueError:  # the space has changed: there is no telling
        return False
    return not tree.is_any_expandable(exclude_running=True)
