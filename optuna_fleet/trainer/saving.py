"""Where a run is saved and leaves its devices, and how its checkpoints are written and read.

They are copied at once and written while training goes on: into the driver's folder, reached by
the trainer itself or by way of the driver.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from optuna_fleet.checkpoints import file as checkpoint_file
from optuna_fleet.checkpoints.file import CheckpointError, Owner
from optuna_fleet.checkpoints.folder import FileName
from optuna_fleet.checkpoints.store import Store, is_shared
from optuna_fleet.events import CheckpointSaved, MoveRefused
from optuna_fleet.exceptions import RetryableError
from optuna_fleet.trainer import checkpoint
from optuna_fleet.trainer.checkpoint import Captured
from optuna_fleet.trainer.gradients.collectives import of_first_rank
from optuna_fleet.trainer.run_parts import Parts
from optuna_fleet.trainer.session import DriverGoneError, Session, Yielded
from optuna_fleet.trainer.training_state import TrainingState
from optuna_fleet.wire import messages
from optuna_fleet.wire.calls import IsAmongBest
from optuna_fleet.wire.channel import Channel
from optuna_fleet.wire.messages import CheckpointFailed, Place, RunTrial
from optuna_fleet.wire.node_messages import Refused
from optuna_fleet.wire.packing import pack, plain
from optuna_fleet.wire.transfer import Get, Put, receive_file, send_file

Make = Callable[[], Captured]


@dataclass(frozen=True, slots=True)
class Held:
    """What a run leaves in its process' memory: what the trial goes on with."""

    content: Captured
    saver: Saver  # which writes it, and has what led to the best report


class Leaving:
    """Of one rank: all call it alike.

    Within an epoch only its first pass can be left. What came before another one would be done
    again, with other weights.

    Attributes:
        held: What the trial goes on with, once it has left; on rank 0.
        is_movable: This epoch could be, or could have been, left in its midst.
    """

    def __init__(self, parts: Parts, state: TrainingState, saver: Saver) -> None:
        self.held: Held | None = None
        self.is_movable = False
        self._parts = parts
        self._session = parts.session
        self._run = parts.run
        self._position = parts.position
        self._state = state
        self._saver = saver
        self._num_passes = 0
        self._num_backward: int | None = None  # passes, when a batch was handed out last
        self._reads_ahead = False

    # -- within an epoch --------------------------------------------------------------------------

    def begin_epoch(self) -> None:
        """None of the epoch's batches was read."""
        self.is_movable = False
        self._num_passes = 0
        self._parts.totals.begin()
        self._session.stop_line.come_to(self._place(0))

    def begin_pass(self, *, movable: bool) -> bool:
        """A pass begins; return whether it can be left in its midst."""
        self._num_passes += 1
        self._num_backward = None
        self._parts.totals.void()
        can_leave = movable and self._num_passes == 1 and self._position.is_inside
        if not can_leave:
            self.end_pass()
        self.is_movable |= can_leave
        return can_leave

    def come_to(self, step: int, number: int) -> None:
        """A step of the pass of this number is about to begin."""
        # A batch that was not trained on when the next one was asked for may be so later.
        self._reads_ahead |= self._num_backward == self._parts.reducer.num_passes
        self._num_backward = self._parts.reducer.num_passes
        if self._reads_ahead or not self._parts.weights.reads_only(number):
            return
        order = self._session.stop_line.take(self._place(step), self._place(step + 1))
        if order is not None and order.saves:
            self.save(step)
        elif order is not None:
            self.leave(step, stays=order.stays)

    def end_pass(self) -> None:
        """The epoch can't be left in its midst any more."""
        loop, epoch, _ = self._place(0)
        self._session.stop_line.come_to((loop, epoch + 1, 0))

    def _place(self, step: int) -> Place:
        return self._position.loop, self._position.epoch, step

    # -- there, or at an epoch's end --------------------------------------------------------------

    def save(self, step: int | None = None) -> None:
        """Begin to write a checkpoint, if it has what is trained and none is being written."""
        if not self._state.is_empty and (found := self._captured(step)) is not None:
            self._saver.save(found)

    def leave(self, step: int | None = None, *, stays: bool) -> None:
        """Leave the objective, before a step of the first pass or at the epoch's end.

        Return if that can't be. Where the trial `stays` it goes on with what rank 0's process has
        in memory; else that is written before.

        Raises:
            Yielded: It has left, even if the objective catches everything.
        """
        self._saver.finish()
        if self._run.rank == 0:  # what is told of a checkpoint after this is of what it leaves
            self._session.send(messages.Leaving(run_id=self._run.run_id))
        found = None if self._state.is_empty else self._captured(step)
        if found is not None:
            self._saver.save(found)
        is_fit = found is not None and (stays or self._saver.finish())
        (is_fit,) = map(bool, of_first_rank([is_fit]))
        if is_fit:
            self.held = Held(found, self._saver) if found else None
            self._session.unwind(Yielded)
        if self._run.rank == 0:
            self._session.send(MoveRefused(run_id=self._run.run_id))

    def _captured(self, step: int | None) -> Captured | None:
        ranks = self._state.meet(step)
        with self._state.gathered():
            if self._run.rank > 0 or self._saver.is_busy:
                return None
            return self._saver.captured(partial(self._state.capture, step, ranks))

    # -- what is left in the end ------------------------------------------------------------------

    def keep_best(self) -> None:
        """Keep what led to the report just made, the best so far, if that may be left."""
        if not self._run.leaves_final or not self._state.objects:
            return
        with self._state.gathered():
            if self._run.rank == 0:
                self._saver.keep_best(self._state.weights)

    def leave_final(self, value: Any) -> None:
        """The objective returned `value`: leave its weights behind, if they are among the best."""
        if not self._run.leaves_final or not self._state.objects:
            return
        is_wanted = self._run.rank == 0 and self._is_wanted(value)
        if self._state.in_parts is not None:
            (is_wanted,) = map(bool, of_first_rank([is_wanted]))
        if not is_wanted:
            return
        with self._state.gathered():
            if self._run.rank == 0:
                self._saver.leave(plain(value), self._state.weights)

    def _is_wanted(self, value: Any) -> bool:
        try:
            return bool(self._session.ask(IsAmongBest, value=pack(plain(value))))
        except Exception:  # it can't be sent, say; the study will be told and say so
            return False


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
            CheckpointSaved(run_id=self._run.run_id, epoch=content.position[1], location=location)
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
        checkpoint_file.write(file, content.file.data, self._owner)

    def load(self, path: str) -> Captured:
        """Read a checkpoint of this trial, see `checkpoint.load`.

        Raises:
            CheckpointError: It can't be read, or is not good.
            RetryableError: The driver can't be reached.
        """
        data = checkpoint_file.contents(path) if self._is_shared else self._fetched(path)
        return checkpoint.loaded(path, data, self._owner)

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
