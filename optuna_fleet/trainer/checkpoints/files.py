"""Where a run's checkpoints are: in the driver's folder, reached by itself or by the driver."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from optuna_fleet.checkpoints import file as checkpoint_file
from optuna_fleet.checkpoints.file import CheckpointError
from optuna_fleet.checkpoints.folder import is_shared
from optuna_fleet.checkpoints.names import FileName
from optuna_fleet.exceptions import RetryableError
from optuna_fleet.wire.channel import Channel
from optuna_fleet.wire.messages import RunTrial
from optuna_fleet.wire.transfer import Get, OpenTransfer, Put, Refused, receive_file, send_file


class RunFiles:
    """Reads and writes the checkpoints of one run's study; the paths are those on the driver."""

    def __init__(self, run: RunTrial, dial: Callable[[], Channel]) -> None:
        self._run = run
        self._dial = dial
        self._is_shared = is_shared(Path(run.folder).parent, run.folder_token)

    def write(
        self, position: tuple[int, ...], kind: str, write: Callable[[IO[bytes]], None]
    ) -> str:
        """Write one of this run's checkpoints, whole or not at all; return where it is.

        Raises:
            CheckpointError: It can't be written, or not be sent to the driver.
        """
        run = self._run
        name = FileName(trial=run.number, position=position, run=run.run_name, kind=kind)
        path = Path(run.folder, str(name))
        if self._is_shared:
            with checkpoint_file.written(path), checkpoint_file.replacing(path) as file:
                write(file)
            return str(path)
        with (
            _said_as(CheckpointError, f"The checkpoint {path} can't be sent to the driver"),
            tempfile.TemporaryFile(prefix="optuna-fleet-") as file,
        ):
            with checkpoint_file.written(Path(tempfile.gettempdir(), str(name))):
                write(file)
                file.flush()
            with self._connected() as channel:
                channel.send(Put(study=run.study_name, name=str(name)))
                send_file(channel, file, stop=channel.has_message)
                answer = channel.receive()
                if isinstance(answer, Refused):
                    raise CheckpointError(answer.problem)
        return str(path)

    def read(self, path: str) -> bytes | bytearray:
        """All that is in a checkpoint of this trial.

        Raises:
            CheckpointError: It can't be read.
            RetryableError: The driver can't be reached.
        """
        if self._is_shared:
            return checkpoint_file.contents(path)
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
            channel.send(OpenTransfer())
            yield channel
        finally:
            channel.close()


@contextmanager
def _said_as(kind: type[Exception], words: str) -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError) as error:
        raise kind(f"{words} ({error or 'the connection was closed'}).") from error
