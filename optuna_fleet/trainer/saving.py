"""Makes the checkpoints of one run: copied at once, written while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from optuna_fleet.checkpoints.file import CheckpointError, Owner
from optuna_fleet.events import CheckpointSaved
from optuna_fleet.trainer import checkpoint
from optuna_fleet.trainer.session import DriverGoneError, Session
from optuna_fleet.wire.messages import CheckpointFailed, RunTrial

Make = Callable[[], checkpoint.Checkpoint]


def owner_of(run: RunTrial) -> Owner:
    """Whose the checkpoints of a run are."""
    return Owner(study=run.study_name, trial=run.number)


class Saver:
    """Writes one checkpoint at a time. What goes wrong is said, and never fails the trial."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._run = session.run
        self._owner = owner_of(session.run)
        self._thread: threading.Thread | None = None
        self._has_failed = False
        self._best: checkpoint.Snapshot | None = None
        self._written_best: checkpoint.Snapshot | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is still being written."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, make: Make) -> None:
        """Copy what `make` returns and begin to write it; `is_busy` must be false."""
        self._has_failed = False
        if (copy := self._copied(make)) is not None:
            thread = threading.Thread(
                target=self._write, args=(copy, self._best), name="optuna-fleet-checkpoint"
            )
            try:
                thread.start()
            except RuntimeError:  # too many threads, or processes
                self._write(copy, self._best)
            else:
                self._thread = thread

    def finish(self) -> bool:
        """Wait until the last checkpoint is written; return whether it was."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return not self._has_failed

    def keep_best(self, make: Make) -> None:
        """Copy what led to the best report so far; it is written with the next checkpoint."""
        self._best = self._copied(make)

    def leave(self, value: float, make: Make) -> None:
        """Write what the trial leaves behind, having returned `value`.

        That is what led to the report of `value`, if that was the best and not the last; else what
        `make` returns.
        """
        self.finish()
        left = None
        if self._session.reports.is_best_before_last(value):
            left = self._best_of(value)
            if left is None:
                self._session.warn(
                    "It returned the best value that it had reported, but nothing good is kept of "
                    "what it had prepared then: its final checkpoint has its last weights."
                )
        left = left or self._copied(make)
        if left is None:
            return
        assert self._run.final_to is not None
        try:
            checkpoint.save(self._run.final_to, left, self._owner, keep_previous=False)
        except Exception as error:
            self._failed(error)

    def _best_of(self, value: float) -> checkpoint.Snapshot | None:
        """What `keep_best` has copied when `value` was reported, in this run or an earlier one."""
        if self._best is None and self._run.best_to is not None:
            with suppress(CheckpointError):
                found = checkpoint.load(self._run.best_to, self._owner, self._run.parameters)
                # One newer than the checkpoint that the trial went on with may be of another.
                if next(reversed(found.history.values())) == value:
                    return checkpoint.snapshot(found)
        return self._best

    def _copied(self, make: Make) -> checkpoint.Snapshot | None:
        try:
            return checkpoint.snapshot(make())
        except Exception as error:
            self._failed(error)
            return None

    def _write(self, copy: checkpoint.Snapshot, best: checkpoint.Snapshot | None) -> None:
        try:
            if best is not None and best is not self._written_best:
                # First: no checkpoint tells of a report of which nothing is kept.
                assert self._run.best_to is not None
                checkpoint.save(self._run.best_to, best, self._owner, keep_previous=False)
                self._written_best = best
            checkpoint.save(self._run.checkpoint_to, copy, self._owner)
        except Exception as error:
            self._failed(error)
            return
        run = self._run
        self._tell(
            CheckpointSaved(run_id=run.run_id, epoch=copy.epoch, location=run.checkpoint_to)
        )

    def _failed(self, error: Exception) -> None:
        self._has_failed = True
        self._tell(CheckpointFailed(run_id=self._run.run_id, problem=str(error)))

    def _tell(self, message: CheckpointSaved | CheckpointFailed) -> None:
        with suppress(DriverGoneError):
            self._session.send_aside(message)
