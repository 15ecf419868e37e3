"""A storage that may be gone for a while: what is asked of it is asked again until it is back."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import TypeVar

import optuna
from optuna.storages import GrpcStorageProxy, InMemoryStorage

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


class Patience:
    """Makes what it is called with, and again while the study's storage is gone.

    What has failed may have gone through all the same, and only the answer was lost: so it must be
    such that it can be done twice. One in memory is never gone.

    Args:
        study: The study.
        patience_s: Seconds to wait; then, and from then on, every call fails.
    """

    def __init__(self, study: optuna.Study, patience_s: float) -> None:
        self._study = study
        self._patience_s = patience_s
        self._end = ""

    def __call__(self, call: Callable[[], T]) -> T:
        """Return what `call` does.

        Raises:
            StorageLostError: The storage has been gone for too long.
            Exception: What `call` raises otherwise.
        """
        since, pause_s, storage = 0.0, _FIRST_PAUSE_S, compat.storage_of(self._study)
        knows_all = not isinstance(storage, GrpcStorageProxy)
        while not self._end:
            try:
                result = call()
            except KeyError:
                if knows_all:
                    raise
                knows_all = True
                self(lambda: compat.trials_of(self._study))  # only then one begun anew knows them
            except Exception as error:
                if isinstance(storage, InMemoryStorage) or not is_gone(error):
                    raise
                since = since or self._noted(error)
                self._wait(error, pause_s, since)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            except BaseException as interrupt:  # Ctrl-C in a transaction: its locks must go
                traceback.clear_frames(interrupt.__traceback__)
                storage.remove_session()
                raise
            else:
                if since:
                    gone_s = time.monotonic() - since
                    compat.fleet_logger.warning(
                        f"The study's storage is back after {gone_s:.1f} s."
                    )
                return result
        raise StorageLostError(self._end)

    def _noted(self, error: Exception) -> float:
        compat.fleet_logger.warning(
            f"The study's storage is gone: {in_words(error)}. Waiting for it, for at most "
            f"{self._patience_s:g} s."
        )
        return time.monotonic()

    def _wait(self, error: Exception, pause_s: float, since: float) -> None:
        left_s = since + self._patience_s - time.monotonic()
        try:
            if left_s <= 0:
                raise StorageLostError(
                    f"The study's storage has been gone for {self._patience_s:g} s, which is "
                    f"`storage_patience_s`: {in_words(error)}. Trials that were under way are "
                    "still RUNNING there."
                ) from error
            time.sleep(min(pause_s, left_s))
        except BaseException as end:  # Ctrl-C: no later call waits again
            self._end = str(end) or "The study's storage was gone when you left."
            raise


def in_words(error: BaseException) -> str:
    """The error's type and first line; of Optuna's own that of its cause, which says more."""
    error = error.__cause__ or error
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
