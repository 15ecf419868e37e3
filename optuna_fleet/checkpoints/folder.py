"""A folder of checkpoints: who may use it, where what lies in it, which call wrote it last."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import socket
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from optuna_fleet.checkpoints.file import replacing
from optuna_fleet.checkpoints.names import (
    FileName,
    newest_first,
    resumable,
    superfluous,
    trial_of,
)
from optuna_fleet.exceptions import FleetConfigError

_LOCK = "lock"
_CALL = "call.json"
_TOKEN = "token"


class FolderLock:
    """Holds a folder for one driver; if this process dies, the kernel lets go of it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._descriptor = -1

    def __enter__(self) -> FolderLock:
        """Take it.

        Raises:
            FleetConfigError: Another driver holds it, or it can't be written to.
        """
        self._descriptor = _locked_file(self._root)
        return self

    def __exit__(self, *_: object) -> None:
        # Not only by closing it: a process that the user forked meanwhile has it open too.
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)

    def renew(self) -> bool:
        """Take it again if somebody has deleted the folder; return whether we hold it."""
        try:
            there = os.stat(self._root / _LOCK)
        except OSError:
            self._root.mkdir(parents=True, exist_ok=True)
            lost, self._descriptor = self._descriptor, _locked_file(self._root)
            os.close(lost)
            return True
        held = os.fstat(self._descriptor)
        return (there.st_dev, there.st_ino) == (held.st_dev, held.st_ino)


def _locked_file(root: Path) -> int:
    try:
        descriptor = os.open(root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise FleetConfigError(
            f"The checkpoint folder {root} can't be used ({error.strerror}): check that it may be "
            "written to and has space."
        ) from error
    try:
        _lock(descriptor, root)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _lock(descriptor: int, root: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FleetConfigError(
            f"The checkpoint folder {root} is in use by {_written_by(descriptor)}: give each "
            "driver that runs at the same time one of its own, or wait until that "
            "one has ended."
        ) from None
    except OSError as error:
        raise FleetConfigError(
            f"The checkpoint folder {root} can't be locked ({error.strerror}): use a folder on a "
            "file system that has locks."
        ) from error
    with contextlib.suppress(OSError):  # a full disk; it only serves the message above
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)


def mark(root: Path) -> str:
    """Leave a token in a driver's folder, by which others know whether they see the same one."""
    token = secrets.token_hex(16)
    with contextlib.suppress(OSError), replacing(root / _TOKEN) as file:  # else none sees it
        file.write(token.encode())
    return token


def is_shared(root: Path, token: str) -> bool:
    """Whether the folder at this path is, from here too, the one that has this token."""
    try:
        return (root / _TOKEN).read_text() == token and os.access(root, os.W_OK)
    except (OSError, ValueError):
        return False


def holder_of(root: Path) -> str | None:
    """Who holds a folder now, in words, or None."""
    try:
        descriptor = os.open(root / _LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _written_by(descriptor)
    finally:
        os.close(descriptor)
    return None


def _written_by(descriptor: int) -> str:
    return os.pread(descriptor, 1000, 0).decode(errors="replace") or "another process"


def study_folders(root: Path) -> dict[Path, str]:
    """The folders in it that have checkpoints, with the names of their studies.

    Raises:
        FleetConfigError: There is no such folder.
    """
    try:
        names = sorted(os.listdir(root))
    except OSError as error:
        raise FleetConfigError(
            f"The checkpoint folder {root} can't be read: {error.strerror}."
        ) from error
    folders = [root / name for name in names if files_in(root / name)]
    return {folder: _study_of(folder) for folder in folders}


def files_in(folder: Path) -> list[Path]:
    """The checkpoints in a study's folder, and what writing them left; in order."""
    try:
        found = [entry for entry in os.scandir(folder) if not entry.is_dir()]
    except OSError:
        return []
    return sorted(folder / entry.name for entry in found if trial_of(entry.name) is not None)


def _study_of(folder: Path) -> str:
    with contextlib.suppress(FleetConfigError):
        if call := _read_call(folder / _CALL):
            return call.study
    return folder.name


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """One `optimize` call, as its folder knows it.

    Attributes:
        study: The study's name.
        id: Marks the trials that belong to the call.
        n_trials: As given.
        timeout: As given.
        has_ended: Whether the call came to its end, well or not; false where its driver died.
        was_interrupted: Whether a Ctrl-C, or the script's own end, cut it short.
        code: Digest of the objective's code; "" if that is not known.
        whole: Likewise, of the values that it uses too.
    """

    study: str
    id: str
    n_trials: int | None
    timeout: float | None
    has_ended: bool = False
    was_interrupted: bool = False
    code: str = ""
    whole: str = ""


def _read_call(path: Path) -> CallRecord | None:
    try:
        return CallRecord(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise FleetConfigError(
            f"The record of the last call, {path}, can't be read ({error}): remove it to begin a "
            "new call. Trials that a dead driver left RUNNING then stay so."
        ) from error


@dataclass(frozen=True, slots=True)
class StudyFolder:
    """The part of a checkpoint folder that is one study's."""

    root: Path
    study_name: str

    @property
    def path(self) -> Path:
        """Where it is; a digest tells apart names that were cut short."""
        digest = hashlib.sha256(self.study_name.encode()).hexdigest()[:12]
        readable = re.sub(r"[^A-Za-z0-9_-]", "_", self.study_name)[:60]
        return self.root / f"{readable}-{digest}"

    def at(self, name: FileName) -> Path:
        """Where the checkpoint of this name is."""
        return self.path / str(name)

    def final(self, number: int) -> Path:
        """Where the checkpoint is that a trial leaves when it is done."""
        return self.at(FileName(trial=number, kind="final"))

    def finals(self) -> set[int]:
        """Numbers of the trials that have left one."""
        return {name.trial for name in self._found() if not name.run}

    def final_bytes(self, number: int) -> int:
        """Size of the checkpoint that a trial has left; 0 if it has none."""
        try:
            return self.final(number).stat().st_size
        except OSError:
            return 0

    def unfinished(self) -> dict[int, str]:
        """Where the newest checkpoints are, good or bad, of trials that are not done."""
        names = [name for name in self._found() if not name.kind]
        return {name.trial: str(self.at(name)) for name in reversed(newest_first(names))}

    def resumable(self, location: str) -> tuple[str, ...]:
        """What a trial whose checkpoint is there can go on from: that, and those before it."""
        newest = FileName.parse(Path(location).name)
        before = [] if newest is None else resumable(self._found(), newest)[1:]
        return (location, *(str(self.at(name)) for name in before))

    def bests(self, number: int) -> tuple[str, ...]:
        """Where a trial that is not done has kept its state at its best, the newest first."""
        bests = [n for n in self._found() if n.trial == number and n.kind == "best"]
        return tuple(str(self.at(name)) for name in newest_first(bests))

    def saved(self, location: str) -> None:
        """A trial's checkpoint is there now: remove what it does not need beside it."""
        if (newest := FileName.parse(Path(location).name)) is not None:
            self._remove(map(str, superfluous(self._found(), newest)))

    def left(self, number: int, run: str) -> bool:
        """The last run of a trial was this one: the trial leaves what it has left, if anything."""
        try:
            os.replace(self.at(FileName(trial=number, run=run, kind="final")), self.final(number))
        except OSError:
            return False
        return True

    def drop_unfinished(self, number: int) -> None:
        """Remove all of a trial but its final checkpoint."""
        final = self.final(number).name
        self._remove(n for n in self._names() if trial_of(n) == number and n != final)

    def drop(self, number: int) -> None:
        """Remove all of a trial."""
        self._remove(name for name in self._names() if trial_of(name) == number)

    def drop_all_but(self, *, unfinished: set[int], finals: set[int]) -> None:
        """Remove all checkpoints but those of these trials, and what writing them left."""
        found = {trial_of(name) for name in self._names()}
        for number in found - unfinished:
            if number is not None:
                self.drop_unfinished(number)
        self._remove(self.final(number).name for number in self.finals() - finals)
        self._remove(name for name in self._names() if name.startswith(f".{_CALL}."))

    def last_call(self) -> CallRecord | None:
        """The last call that used this folder.

        Raises:
            FleetConfigError: Its record is damaged.
        """
        return _read_call(self.path / _CALL)

    def has_record(self) -> bool:
        """Whether a call has left its record."""
        return os.path.exists(self.path / _CALL)  # false, too, where the folder is out of reach

    def record_call(self, call: CallRecord) -> None:
        """Replace the record of the last call.

        Raises:
            OSError: It can't be written.
        """
        with replacing(self.path / _CALL) as file:
            file.write(json.dumps(asdict(call)).encode())

    def _found(self) -> list[FileName]:
        return [name for text in self._names() if (name := FileName.parse(text)) is not None]

    def _names(self) -> list[str]:
        try:
            return os.listdir(self.path)
        except OSError:
            return []

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            # On a disk that has become read-only it stays, and is found by the next call.
            with contextlib.suppress(OSError):
                (self.path / name).unlink()


def private_folder() -> Path:
    """Make a temporary folder for checkpoints that end with the executor."""
    try:
        return Path(tempfile.mkdtemp(prefix="optuna-fleet-"))
    except OSError as error:
        raise FleetConfigError(
            f"No temporary folder for checkpoints can be made ({error}): set the environment "
            "variable TMPDIR to a folder that can be written to, or one to FleetExecutor as "
            "`checkpoints`."
        ) from error
