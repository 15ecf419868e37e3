"""Makes the checkpoints of one run: copied at once, written while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from optuna_fleet.messages import CheckpointFailed
from optuna_fleet.trainer import checkpoint
from optuna_fleet.trainer.session import DriverGoneError, Session


class Saver:
    """Writes one checkpoint at a time. What goes wrong is said, and never fails the trial."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._thread: threading.Thread | None = None
        self._has_failed = False

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is still being written."""
        return self._thread is not None and self._thread.is_alive()

    def save(
        self, path: str, make: Callable[[], checkpoint.Checkpoint], *, keep_previous: bool = True
    ) -> None:
        """Copy what `make` returns and begin to write it to `path`; `is_busy` must be false."""
        self._has_failed = False
        if (copy := self.copied(make)) is not None:
            self.write(path, copy, keep_previous=keep_previous)

    def copied(self, make: Callable[[], checkpoint.Checkpoint]) -> checkpoint.Snapshot | None:
        """Copy what `make` returns; None where that can't be done."""
        try:
            return checkpoint.snapshot(make())
        except Exception as error:
            self._failed(error)
            return None

    def write(self, path: str, copy: checkpoint.Snapshot, *, keep_previous: bool = True) -> None:
        """Begin to write a copy to `path`; `is_busy` must be false."""
        self._thread = threading.Thread(
            target=self._write, args=(path, copy, keep_previous), name="optuna-fleet-checkpoint"
        )
        self._thread.start()

    def finish(self) -> bool:
        """Wait until the last checkpoint is written; return whether it was."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return not self._has_failed

    def _write(self, path: str, copy: checkpoint.Snapshot, keep_previous: bool) -> None:
        try:
            checkpoint.save(path, copy, keep_previous=keep_previous)
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        self._has_failed = True
        problem = CheckpointFailed(run_id=self._session.run.run_id, problem=str(error))
        with suppress(DriverGoneError):
            self._session.send_aside(problem)
