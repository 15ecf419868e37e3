"""Every private name of Optuna that we use, in one place; tested with all supported versions."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from typing import Any

import optuna
from optuna.progress_bar import _ProgressBar
from optuna.storages._heartbeat import (
    BaseHeartbeatThread,
    get_heartbeat_thread,
    is_heartbeat_enabled,
)
from optuna.study._optimize import _log_failed_trial
from optuna.study._tell import _tell_with_warning
from optuna.trial import TrialState

# Optuna logs each trial's end under this name; users filter and tests look for it.
logger = optuna.logging.get_logger("optuna.study._optimize")

# Below Optuna's root logger, so that its handlers and verbosity hold for our lines too.
fleet_logger = optuna.logging.get_logger("optuna.fleet")

ProgressBar = _ProgressBar


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


def is_stopped(study: optuna.Study) -> bool:
    """Whether `study.stop()` was called in this loop."""
    return study._stop_flag


def storage_of(study: optuna.Study) -> optuna.storages.BaseStorage:
    """The study's storage."""
    return study._storage


def names_of(study: optuna.Study) -> dict[int, str]:
    """What an objective must not take a copy of, by `id`: the study and its storage."""
    return {id(study): "study", id(study._storage): "storage"}


def id_of(trial: optuna.Trial) -> int:
    """The trial's id in its storage (users see its number)."""
    return trial._trial_id


def frozen(study: optuna.Study, trial: optuna.Trial) -> optuna.trial.FrozenTrial:
    """The trial as the storage has it now."""
    return study._storage.get_trial(trial._trial_id)


def fail_stale_trials(study: optuna.Study) -> None:
    """Fail trials whose heartbeat stopped, if the storage has heartbeats."""
    if is_heartbeat_enabled(study._storage):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            optuna.storages.fail_stale_trials(study)


Heartbeat = BaseHeartbeatThread


def heartbeat(study: optuna.Study, trial: optuna.Trial) -> Heartbeat:
    """A thread, not yet started, that records heartbeats of the trial until it is joined."""
    return get_heartbeat_thread(trial._trial_id, study._storage)


def forget_cached_trials(study: optuna.Study) -> None:
    """Drop the trials cached for one trial's duration: with several in flight it goes stale."""
    study._thread_local.cached_all_trials = None


def give_back(study: optuna.Study, trial: optuna.Trial) -> None:
    """Return an asked trial to the study: WAITING, with its parameters; the next `ask` gets it."""
    study._storage.set_trial_state_values(trial._trial_id, TrialState.WAITING)
    forget_cached_trials(study)


def set_trial_record(study: optuna.Study, trial: optuna.Trial, key: str, value: Any) -> None:
    """Store a record of ours with the trial, unless someone else has told it as finished."""
    with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
        study._storage.set_trial_system_attr(trial._trial_id, key, value)


def set_study_record(study: optuna.Study, key: str, value: Any) -> None:
    """Store a record of ours with the study."""
    study._storage.set_study_system_attr(study._study_id, key, value)


def study_records(study: optuna.Study, prefix: str) -> list[Any]:
    """Our records of the study whose keys begin like this."""
    records = study._storage.get_study_system_attrs(study._study_id)
    return [value for key, value in records.items() if key.startswith(prefix)]


def tell(
    study: optuna.Study,
    trial: optuna.Trial,
    value: float | Sequence[float] | None,
    state: TrialState | None,
) -> tuple[TrialState, list[float] | None, str | None]:
    """`Study.tell` as in `Study.optimize`: bad values fail the trial; described, not raised."""
    state, values, problem = _tell_with_warning(
        study=study, trial=trial, value_or_values=value, state=state, suppress_warning=True
    )
    return state, None if values is None else list(values), problem


def log_completed(study: optuna.Study, trial: optuna.Trial, values: list[float]) -> None:
    """Optuna's line on a completed trial."""
    study._log_completed_trial(values, trial.number, trial.params)


def log_failed(
    trial: optuna.Trial, message: str, value: Any, error: BaseException | None = None
) -> None:
    """Optuna's two lines on a failed trial."""
    exc_info = (type(error), error, error.__traceback__) if error is not None else None
    _log_failed_trial(trial.number, trial.params, message, exc_info, value)
