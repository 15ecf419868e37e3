"""What checkpoints there are: listed, verified and pruned, for the command line."""

from __future__ import annotations

import contextlib
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from optuna_fleet.checkpoints.file import CheckpointError, Owner, inspect
from optuna_fleet.checkpoints.folder import StudyFolder, study_of
from optuna_fleet.checkpoints.names import FileName, trial_of
from optuna_fleet.checkpoints.store import Store
from optuna_fleet.exceptions import FleetConfigError

_LONGEST_NAME = 40
_KINDS = {"": "unfinished", "best": "unfinished, at its best", "final": "unfinished, at its end"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A checkpoint in a folder.

    `epoch` counts those that its trial had done, in its last loop; it is None where that can't be
    read. `problem` says what is wrong with it.
    """

    path: Path
    study: str
    trial: int
    kind: str
    epoch: int | None
    num_bytes: int
    age_s: float
    problem: str | None


def entries(root: Path, *, verify: bool) -> list[Entry]:
    """The checkpoints in a folder, by study and trial; without `verify` no payload is read."""
    found: list[Entry] = []
    for store, names in _stored(root):
        study = study_of(store)
        found += filter(None, (_entry(study, store, text, verify) for text in names))
    return sorted(found, key=lambda entry: (entry.study, entry.trial, entry.epoch or 0))


def _stored(root: Path) -> Iterator[tuple[Store, list[str]]]:
    """The checkpoints of each study, and what writing them left; in order."""
    try:
        stores = [Store(root / name) for name in sorted(Store(root).list())]
    except OSError as error:
        raise FleetConfigError(
            f"The checkpoint folder {root} can't be read: {error.strerror}."
        ) from error
    for store in stores:
        with contextlib.suppress(OSError):
            if names := sorted(name for name in store.list() if trial_of(name) is not None):
                yield store, names


def _entry(study: str, store: Store, text: str, verify: bool) -> Entry | None:
    name, path = FileName.parse(text), store.root / text
    if name is None:
        return None
    epoch, problem = None, None
    try:
        status = store.about(text)
        if not stat.S_ISREG(status.st_mode):  # a pipe, say, which could block
            return None
        is_named = StudyFolder(path.parents[1], study).path.name == path.parent.name
        owner = Owner(study=study, trial=name.trial) if is_named else None
        epoch = inspect(path, owner, verify=verify).epoch
    except FileNotFoundError:  # its driver has just removed it
        return None
    except CheckpointError as error:
        problem = str(error)
    return Entry(
        path=path,
        study=study,
        trial=name.trial,
        kind=_KINDS[name.kind] if name.run else "final",
        epoch=epoch,
        num_bytes=status.st_size,
        age_s=max(0.0, time.time() - status.st_mtime),
        problem=problem,
    )


def table(found: Sequence[Entry], *, verified: bool) -> list[str]:
    """The lines of a table of checkpoints, and below it what is wrong with some of them."""
    rows = [("STUDY", "TRIAL", "EPOCH", "SIZE", "AGE", "KIND", "STATE")]
    rows += [_row(entry, verified=verified) for entry in found]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return [*lines, *(entry.problem for entry in found if entry.problem)]


def _row(entry: Entry, *, verified: bool) -> tuple[str, str, str, str, str, str, str]:
    return (
        _shown(entry.study),
        str(entry.trial),
        "?" if entry.epoch is None else str(entry.epoch),
        f"{entry.num_bytes / 1e6:.1f} MB",
        f"{entry.age_s / 3600:.1f} h",
        entry.kind,
        "damaged" if entry.problem else "good" if verified else "not verified",
    )


def _shown(name: str) -> str:
    """A study's name in one short line, without control characters."""
    plain = "".join(c if c.isprintable() else repr(c)[1:-1] for c in name) or "''"
    return plain if len(plain) <= _LONGEST_NAME else plain[: _LONGEST_NAME - 1] + "…"


def prune(root: Path) -> Iterator[Path]:
    """Remove, and yield, all but the good checkpoints of trials that are done.

    Trials that a dead driver left unfinished then begin anew when the same call goes on.

    Raises:
        FleetConfigError: A driver is using the folder, or a file can't be removed.
    """
    with Store(root).hold():
        kept = {e.path for e in entries(root, verify=True) if e.kind == "final" and not e.problem}
        for store, names in _stored(root):
            for path in (store.root / name for name in names):
                if path not in kept and not stat.S_ISDIR(store.about(path.name).st_mode):
                    _remove(store, path)
                    yield path


def _remove(store: Store, path: Path) -> None:
    try:
        store.remove(path.name)
    except OSError as error:
        raise FleetConfigError(f"{path} can't be removed: {error.strerror}.") from error
