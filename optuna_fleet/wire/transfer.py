"""How a checkpoint travels between a trainer and the driver's folder, where no disk is shared.

Likewise the data sets, to agents on other machines. On a connection of its own to the driver's
listener, which `Put`, `Get` or `GetDataSets` begins. A file goes in pieces, of which the last is
empty; neither end keeps more than one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from optuna_fleet.checkpoints.file import CheckpointError, readable, written
from optuna_fleet.checkpoints.folder import FileName, StudyFolder
from optuna_fleet.checkpoints.store import Store
from optuna_fleet.wire.channel import Channel
from optuna_fleet.wire.node_messages import Refused

PIECE_BYTES = 1 << 20
_SILENCE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """A file follows, of this name, for the folder of this study; None or `Refused` answers."""

    study: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Get:
    """Answer with a file; or with `Refused`, in its place or that of its rest."""

    study: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GetDataSets:
    """Likewise, with the file that has the data sets of the fleet in it."""


def send_file(
    channel: Channel, file: IO[bytes], *, stop: Callable[[], bool] = lambda: False
) -> None:
    """Send a file from its beginning; `stop` is asked before each piece."""
    file.seek(0)
    while not stop() and (data := file.read(PIECE_BYTES)):
        channel.send(data)
    channel.send(b"")


def receive_file(receive: Callable[[], Any], write: Callable[[bytes], Any]) -> None:
    """Receive a file.

    Raises:
        CheckpointError: It is refused.
        EOFError: The other end is gone, and so are `OSError`s of `receive`.
    """
    while data := receive():
        if isinstance(data, Refused):
            raise CheckpointError(data.problem)
        write(data)


class TransferServer:
    """Serves each connection on a thread of its own; the driver's own thread never waits.

    Args:
        data_sets: Returns the path of the file with the data sets, if there is one.
    """

    def __init__(self, root: Path, data_sets: Callable[[], str | None] = lambda: None) -> None:
        self._root = root
        self._data_sets = data_sets
        self._lock = threading.Lock()
        self._at_work: dict[threading.Thread, Channel] = {}
        self._is_closed = False

    def serve(self, channel: Channel, request: Put | Get | GetDataSets) -> None:
        """Serve what a connection asks for, in the background, and close it then."""
        thread = threading.Thread(
            target=self._serve, args=(channel, request), name="optuna-fleet-transfer", daemon=True
        )
        with self._lock:
            try:
                if not self._is_closed:
                    self._at_work = {t: c for t, c in self._at_work.items() if t.is_alive()}
                    thread.start()
                    self._at_work[thread] = channel
                    return
            except RuntimeError:  # too many threads, or processes: the other end says so
                pass
        channel.close()

    def close(self) -> None:
        """Cut all connections. What has not arrived as a whole leaves nothing."""
        with self._lock:
            self._is_closed = True
            at_work, self._at_work = self._at_work, {}
        for thread, channel in at_work.items():
            channel.cut()
            thread.join()

    # -- on a thread ------------------------------------------------------------------------------

    def _serve(self, channel: Channel, request: Put | Get | GetDataSets) -> None:
        try:
            self._answer(channel, request)
            while True:  # until the other end has read all, and leaves
                _next(channel)
        except (EOFError, OSError):
            pass
        finally:
            channel.close()

    def _answer(self, channel: Channel, request: Put | Get | GetDataSets) -> None:
        try:
            path = self._path_of(request)
            if isinstance(request, Get | GetDataSets):
                with readable(path), Store(path.parent).read(path.name) as file:
                    send_file(channel, file)
                return
            with written(path), Store(path.parent).write(path.name) as file:
                receive_file(partial(_next, channel), file.write)
            channel.send(None)
        except CheckpointError as error:
            channel.send(Refused(problem=str(error)))

    def _path_of(self, request: Put | Get | GetDataSets) -> Path:
        if isinstance(request, GetDataSets):
            if (path := self._data_sets()) is None:
                raise CheckpointError("There are none: the fleet has no pipeline, or has ended.")
            return Path(path)
        name = FileName.parse(request.name)
        # What a trial leaves in the end is named by the driver only.
        if name is None or (isinstance(request, Put) and not name.run):
            raise CheckpointError(f"This was asked for, but is no checkpoint: {request!r:.200}.")
        return StudyFolder(self._root, request.study).at(name)


def _next(channel: Channel) -> Any:
    return channel.receive(_SILENCE_S)  # its machine may be gone
