"""The checkpoints of one run: copied at once, written while training goes on, and read.

They are in the driver's folder, reached by the trainer itself or by way of the driver.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from optuna_fleet.checkpoints import file as checkpoint_file
from optuna_fleet.checkpoints.file import CheckpointError, Owner
from optuna_fleet.checkpoints.names import FileName
from optuna_fleet.checkpoints.store import Store, is_shared
from optuna_fleet.events import CheckpointSaved
from optuna_fleet.exceptions import RetryableError
from optuna_fleet.trainer import checkpoint
from optuna_fleet.trainer.checkpoint import Captured
from optuna_fleet.trainer.session import DriverGoneError, Session
from optuna_fleet.wire.channel import Channel
from optuna_fleet.wire.messages import CheckpointFailed, RunTrial
from optuna_fleet.wire.node_messages import Refused
from optuna_fleet.wire.transfer import Get, Put, receive_file, send_file

Make = Callable[[], Captured]


class Saver:
    """Writes one checkpoint at a time. What goes wrong is said, and never fails the trial.

    One that comes after another, of the run that has left what this one goes on with, has what
    led to the best report.
    """

    def __init__(self, session: Session, before: Saver | None = None) -> None:
        self._session = session
        self._run = session.run
        self._files = RunFiles(self._run, session.dial)
        self._thread: threading.Thread | None = before._thread if before else None
        self._has_failed = False
        self._best: Captured | None = before._best if before else None
        self._written_best: Captured | None = before._written_best if before else None

    def newest(self) -> Captured | None:
        """Read the newest good one that the trial has; the user hears what is wrong with newer."""
        for path in self._run.checkpoints:
            try:
                return self._files.load(path)
            except CheckpointError as error:
                self._session.warn(str(error))
        return None

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is still being written."""
        return self._thread is not None and self._thread.is_alive()

    def captured(self, capture: Make) -> Captured | None:
        """What `capture` returns, or None if it can't."""
        try:
            return capture()
        except Exception as error:
            self._failed(error)
            return None

    def save(self, content: Captured) -> None:
        """Begin to write it, if there is a folder; `is_busy` must be false."""
        self._has_failed = False
        if not self._run.folder:  # a rehearsal leaves nothing behind
            return
        thread = threading.Thread(
            target=self._write, args=(content, self._best), name="optuna-fleet-checkpoint"
        )
        try:
            thread.start()
        except RuntimeError:  # too many threads, or processes
            self._write(content, self._best)
        else:
            self._thread = thread

    def finish(self) -> bool:
        """Wait until the last checkpoint is written; return whether it was."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return not self._has_failed

    def keep_best(self, capture: Make) -> None:
        """Keep what led to the best report so far; it is written with the next checkpoint."""
        self._best = self.captured(capture)

    def leave(self, value: float, capture: Make) -> None:
        """Write what the trial leaves behind, having returned `value`.

        That is what led to its report, if it was the best and not the last; else what it captures.
        """
        self.finish()
        left, reports = None, self._session.reports
        if value == reports.best and value != next(reversed(reports.values.values())):
            left = self._best_of(value)
            if left is None:
                self._session.warn(
                    "It returned the best value that it had reported, but nothing good is kept of "
                    "what it had prepared then: its final checkpoint has its last weights."
                )
        left = left or self.captured(capture)
        if left is None:
            return
        try:
            self._files.write((), "final", left)
        except Exception as error:
            self._failed(error)

    def _best_of(self, value: float) -> Captured | None:
        """What `keep_best` has kept when `value` was reported, in this run or an earlier one."""
        for path in self._run.bests if self._best is None else ():
            with suppress(CheckpointError, RetryableError):
                found = self._files.load(path)
                # One newer than the checkpoint that the trial went on with may be of another.
                if next(reversed(found.content.history.values())) == value:
                    return found
        return self._best

    def _write(self, content: Captured, best: Captured | None) -> None:
        try:
            if best is not None and best is not self._written_best:
                # First: no checkpoint tells of a report of which nothing is kept.
                self._files.write(content.position, "best", best)
                self._written_best = best
            location = self._files.write(content.position, "", content)
        except Exception as error:
            self._has_failed = True
            self._failed(error)
            return
        self._tell(
            CheckpointSaved(run_id=self._run.run_id, epoch=content.epoch, location=location)
        )

    def _failed(self, error: Exception) -> None:
        self._tell(CheckpointFailed(run_id=self._run.run_id, problem=str(error)))

    def _tell(self, message: CheckpointSaved | CheckpointFailed) -> None:
        with suppress(DriverGoneError):
            self._session.send(message)


class RunFiles:
    """Reads and writes the checkpoints of one run's study; the paths are those on the driver."""

    def __init__(self, run: RunTrial, dial: Callable[[], Channel]) -> None:
        self._run = run
        self._owner = Owner(study=run.study_name, trial=run.number)
        self._dial = dial
        self._is_shared = is_shared(Path(run.folder).parent, run.folder_token)

    def write(self, position: tuple[int, ...], kind: str, content: Captured) -> str:
        """Write one of this run's checkpoints, whole or not at all; return where it is.

        Raises:
            CheckpointError: It can't be written, or not be sent to the driver.
        """
        run = self._run
        name = FileName(trial=run.number, position=position, run=run.run_name, kind=kind)
        path = Path(run.folder, str(name))
        if self._is_shared:
            with checkpoint_file.written(path), Store(path.parent).write(path.name) as file:
                self._put(file, content)
            return str(path)
        with (
            _said_as(CheckpointError, f"The checkpoint {path} can't be sent to the driver"),
            tempfile.TemporaryFile(prefix="optuna-fleet-") as file,
        ):
            with checkpoint_file.written(Path(tempfile.gettempdir(), str(name))):
                self._put(file, content)
                file.flush()
            with self._connected() as channel:
                channel.send(Put(study=run.study_name, name=str(name)))
                send_file(channel, file, stop=channel.has_message)
                answer = channel.receive()
                if isinstance(answer, Refused):
                    raise CheckpointError(answer.problem)
        return str(path)

    def _put(self, file: IO[bytes], content: Captured) -> None:
        checkpoint_file.write(file, content.file.data, owner=self._owner, epoch=content.epoch)

    def load(self, path: str) -> Captured:
        """Read a checkpoint of this trial, see `checkpoint.load`.

        Raises:
            CheckpointError: It can't be read, or is not good.
            RetryableError: The driver can't be reached.
        """
        run = self._run
        data = checkpoint_file.contents(path) if self._is_shared else self._fetched(path)
        return checkpoint.loaded(path, data, self._owner, run.parameters)

    def _fetched(self, path: str) -> bytearray:
        data = bytearray()
        with (
            _said_as(RetryableError, f"The checkpoint {path} can't be fetched from the driver"),
            self._connected() as channel,
        ):
            channel.send(Get(study=self._run.study_name, name=Path(path).name))
            receive_file(channel.receive, data.extend)
        return data

    @contextmanager
    def _connected(self) -> Iterator[Channel]:
        channel = self._dial()
        try:
            yield channel
        finally:
            channel.close()


@contextmanager
def _said_as(kind: type[Exception], words: str) -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError) as error:
        raise kind(f"{words} ({error or 'the connection was closed'}).") from error
