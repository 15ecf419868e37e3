"""A storage that may be gone for a while: calls of it are retried until it is back."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, TypeVar

import optuna
from optuna.trial import FrozenTrial, TrialState, create_trial

from optuna_fleet.exceptions import StorageLostError
from optuna_fleet.sampler_bridge import compat

T = TypeVar("T")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0

# By name: none of these libraries is imported unless the user's storage needs it.
_GONE = {
    ("sqlalchemy.exc", "OperationalError"),
    ("sqlalchemy.exc", "InterfaceError"),
    # A connection was lost before, as Optuna read trials: it takes that for too long a query.
    ("sqlalchemy.exc", "PendingRollbackError"),
    ("redis.exceptions", "ConnectionError"),
    ("redis.exceptions", "TimeoutError"),
}

# What databases say in an OperationalError though no waiting helps.
_PERMANENT = (
    "no such table",
    "no such column",
    "syntax error",
    "readonly database",
    "not a database",
    "malformed",
    "authentication failed",
)


def is_gone(error: BaseException | None) -> bool:
    """Whether an error of a storage means that it may work again later.

    Those are a database that can't be reached or is locked, a gRPC proxy that can't be reached or
    whose own database fails, and any OSError, such as that of a journal file.
    """
    if error is None:
        return False
    names = {(kind.__module__, kind.__name__) for kind in type(error).__mro__}
    if names & _GONE and any(words in str(error) for words in _PERMANENT):
        return False
    if names & _GONE or isinstance(error, OSError):
        return True
    if getattr(error, "connection_invalidated", False):  # SQLAlchemy lost it
        return True
    if ("grpc", "RpcError") in names:
        # Of an error of the database behind it, the proxy sends nothing but Optuna's text.
        code, details = error.code().name, error.details() or ""  # type: ignore[attr-defined]
        return code == "UNAVAILABLE" or "exception is raised during the commit" in details
    return isinstance(error, optuna.exceptions.StorageInternalError) and is_gone(error.__cause__)


class RetryingStorage:
    """A study's storage whose calls wait while it is gone.

    Each method is one transaction, called again until it succeeds. An attempt that has failed may
    have been carried out all the same, only its answer was lost. Writing the same attribute,
    parameter or value again changes nothing; for what would happen twice, the storage is asked
    first whether it has happened.

    Args:
        storage: The study's storage.
        patience_s: Seconds to wait for it; then, and from then on, every call fails.
        study_id: Of the study, in the storage.

    Attributes:
        num_calls: Of `optimize`, that use it: threads may optimize one study at once.
    """

    def __init__(
        self, storage: optuna.storages.BaseStorage, patience_s: float, study_id: int = 0
    ) -> None:
        self.itself = storage
        self._study_id = study_id
        self.num_calls = 1
        self._patience_s = patience_s
        self._lock = threading.Lock()  # heartbeats are recorded by threads of their own
        self._gone_since: float | None = None
        self._end = ""
        self._with_heartbeat: set[int] = set()

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Optuna asks storages whether they are of a kind that has heartbeats."""
        return type(self.itself)

    def __reduce__(self) -> Any:
        return _itself, (self.itself,)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.itself, name)
        if not callable(attribute) or name == "remove_session":
            return attribute

        @functools.wraps(attribute)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._retry(lambda: attribute(*args, **kwargs))

        return call

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        """See `BaseStorage`; one that was created, but not answered, is found by its start."""
        trial = template_trial or create_trial(state=TrialState.RUNNING)

        def created() -> int | None:
            started = trial.datetime_start
            trials = self.itself.get_all_trials(study_id, False, (trial.state,))
            found = (t._trial_id for t in trials if started and t.datetime_start == started)
            return next(found, None)

        return self._retry(lambda: self.itself.create_new_trial(study_id, trial), created)

    def set_trial_param(self, *args: Any) -> None:
        """See `BaseStorage`; Optuna's proxy, started anew, knows a trial once it has read all."""

        def attempt() -> None:
            try:
                self.itself.set_trial_param(*args)
            except KeyError:
                self.itself.get_all_trials(self._study_id, deepcopy=False)
                self.itself.set_trial_param(*args)

        self._retry(attempt)

    def set_trial_state_values(
        self, trial_id: int, state: TrialState, values: Sequence[float] | None = None
    ) -> bool:
        """See `BaseStorage`; a trial is taken, returned or told once."""
        attempts: list[tuple[datetime, datetime]] = []

        def attempt() -> bool:
            began = datetime.now()
            try:
                return self.itself.set_trial_state_values(trial_id, state, values)
            finally:
                attempts.append((began, datetime.now()))

        def told() -> bool | None:
            trial = self.itself.get_trial(trial_id)
            wanted = None if values is None else [*values]
            return (trial.state, trial.values) == (state, wanted) or None

        def returned() -> bool | None:
            return self._started(trial_id) != before or None

        def taken() -> bool | None:
            started = self._started(trial_id)
            return any(started and a <= started <= b for a, b in attempts) or None

        if state.is_finished():
            self._with_heartbeat.discard(trial_id)
            return self._retry(attempt, told)
        if state is TrialState.WAITING:
            before = self._retry(lambda: self._started(trial_id))
            return self._retry(attempt, returned)
        return self._retry(attempt, taken)

    def _started(self, trial_id: int) -> datetime | None:
        """When the trial was started, if it is running."""
        trial = self.itself.get_trial(trial_id)
        return trial.datetime_start if trial.state is TrialState.RUNNING else None

    def record_heartbeat(self, trial_id: int) -> None:
        """See `BaseHeartbeat`; if the storage is lost, the driver says so."""
        self._with_heartbeat.add(trial_id)
        with contextlib.suppress(StorageLostError):
            self._retry(lambda: self.itself.record_heartbeat(trial_id))  # type: ignore[attr-defined]

    def _get_stale_trial_ids(self, study_id: int) -> list[int]:
        """Without those whose heartbeats could not be recorded while the storage was gone."""
        stale = self._retry(lambda: self.itself._get_stale_trial_ids(study_id))  # type: ignore[attr-defined]
        return [trial_id for trial_id in stale if trial_id not in self._with_heartbeat]

    # -- waiting ----------------------------------------------------------------------------------

    def _retry(
        self, call: Callable[[], T], has_happened: Callable[[], T | None] = lambda: None
    ) -> T:
        """Return what `call` returns, or what `has_happened` does before a further attempt."""
        is_repeated, pause_s, since = False, _FIRST_PAUSE_S, None
        while not self._end:
            try:
                known = has_happened() if is_repeated else None
                result = call() if known is None else known
            except Exception as error:
                if not is_gone(error):
                    raise
                since = since or time.monotonic()
                try:
                    self._wait(error, pause_s, since)
                except BaseException as end:  # Ctrl-C: no later call waits again
                    self._end = str(end) or "The study's storage was gone when you left."
                    raise
                is_repeated, pause_s = True, min(2 * pause_s, _LONGEST_PAUSE_S)
            except BaseException as interrupt:  # Ctrl-C in the midst of it
                self._roll_back(interrupt)
                raise
            else:
                if self._gone_since is not None:
                    self._note_return()
                return result
        raise StorageLostError(self._end)

    def _roll_back(self, interrupt: BaseException) -> None:
        """End this thread's transaction, whose locks would keep out the other threads, and us.

        An exception that strikes between a transaction and its own end leaves it open, for as
        long as somebody has the exception's traceback; or only a cursor that has read a part.
        """
        traceback.clear_frames(interrupt.__traceback__)
        with contextlib.suppress(Exception):
            self.itself.remove_session()

    def _wait(self, error: Exception, pause_s: float, since: float) -> None:
        now = time.monotonic()
        with self._lock:
            is_first, self._gone_since = self._gone_since is None, self._gone_since or now
            # By this call, even where those of other threads succeed.
            left_s = min(self._gone_since, since) + self._patience_s - now
        if left_s <= 0:
            raise StorageLostError(
                f"The study's storage has been gone for {self._patience_s:g} s, which is "
                f"`storage_patience_s`: {in_words(error)}. Trials that were under way are still "
                "RUNNING there."
            ) from error
        if is_first:
            compat.fleet_logger.warning(
                f"The study's storage is gone: {in_words(error)}. Waiting for it, for at most "
                f"{self._patience_s:g} s."
            )
        time.sleep(min(pause_s, left_s))

    def _note_return(self) -> None:
        with self._lock:
            gone_since, self._gone_since = self._gone_since, None
        if gone_since is not None:
            gone_s = time.monotonic() - gone_since
            compat.fleet_logger.warning(f"The study's storage is back after {gone_s:.1f} s.")


def retry_storage(study: optuna.Study, patience_s: float) -> None:
    """Make the study wait for its storage; one in memory is never gone."""
    storage: Any = compat.storage_of(study)
    if isinstance(storage, RetryingStorage):
        storage.num_calls += 1
    elif not isinstance(storage, optuna.storages.InMemoryStorage):
        compat.set_storage(study, RetryingStorage(storage, patience_s, study._study_id))


def stop_retrying(study: optuna.Study) -> None:
    """Give the study its own storage back, once no call is left."""
    storage: Any = compat.storage_of(study)
    if isinstance(storage, RetryingStorage):
        storage.num_calls -= 1
        if not storage.num_calls:
            compat.set_storage(study, storage.itself)


def in_words(error: BaseException) -> str:
    """The error's type and first line; of Optuna's own that of its cause, which says more."""
    error = error.__cause__ or error
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _itself(storage: optuna.storages.BaseStorage) -> optuna.storages.BaseStorage:
    return storage
