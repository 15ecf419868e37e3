"""What users do with checkpoints: load the best trial's weights, see and prune what there is."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna

from optuna_fleet.arguments import check_number, check_that, is_a
from optuna_fleet.arguments import path as argument_path
from optuna_fleet.checkpoint_folder import FolderLock, StudyFolder, files_in, study_folders
from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.sampler_bridge.ownership import folders_of
from optuna_fleet.trainer.checkpoint_file import CheckpointError, Owner, inspect

if TYPE_CHECKING:
    import torch

_FILE = re.compile(r"trial-(\d+)\.(final\.pt|best\.pt|pt\.previous|pt)")
_LONGEST_NAME = 40
_KINDS = {
    "final.pt": "final",
    "best.pt": "unfinished, at its best",
    "pt": "unfinished",
    "pt.previous": "unfinished, the one before",
}


def load_best_model(
    study: optuna.Study,
    model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
    *,
    trial: int | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> Any:
    """Load the weights that a study's best trial left behind.

    It must have run with ``FleetExecutor(checkpoints=FOLDER)`` and have used ``trial.prepare``;
    the best trials, as many as `Checkpoints` keeps, leave their weights. A trial that returns the
    best of the values it reported leaves those with which it reported it; any other its last ones.

    Args:
        study: The study.
        model: The module to load them into, built as in the objective; or several, in the order in
            which the objective prepared them. None if you want the bare state.
        trial: Number of another trial than the best; needed where there are several objectives.
        folder: Where the checkpoints are now, if they were moved since.

    Returns:
        `model`, on the device where it was; or, without it, a list with the ``state_dict`` of each
        object that the trial prepared, in that order, on the CPU.

    Raises:
        FleetConfigError: The trial left no checkpoint, or it has fewer modules than were given.
        CheckpointError: The checkpoint is damaged, or of another trial.
        RuntimeError: The weights do not fit the module (raised by torch).
    """
    from optuna_fleet.trainer import checkpoint  # imports torch
    from optuna_fleet.trainer.compiled import load_state

    check_that("study", study, is_a(optuna.Study), "be a study, as of optuna.load_study()")
    check_number("trial", trial, whole=True, optional=True)
    _check_modules(model)
    chosen = study.best_trial if trial is None else _numbered(study, trial)
    path = _final_of(study, chosen, folder)
    loaded = checkpoint.load(path, Owner(study=study.study_name, trial=chosen.number))
    if model is None:
        return loaded.objects
    modules = [model] if not isinstance(model, Sequence) else model
    if len(modules) > len(loaded.modules):
        raise FleetConfigError(
            f"`model` has {len(modules)} modules, but trial {chosen.number} has prepared "
            f"{len(loaded.modules)}: give those that the objective gives to trial.prepare()."
        )
    for module, position in zip(modules, loaded.modules, strict=False):
        load_state(module, loaded.objects[position])
    return model


def _check_modules(model: Any) -> None:
    import torch

    modules = model if isinstance(model, Sequence) else [model]
    if model is not None and not all(isinstance(each, torch.nn.Module) for each in modules):
        raise FleetConfigError(
            f"`model` is {model!r:.100}, but must be a torch.nn.Module, or several in a list."
        )


def _numbered(study: optuna.Study, number: int) -> optuna.trial.FrozenTrial:
    trials = study.trials
    if not 0 <= number < len(trials):
        raise FleetConfigError(
            f"`trial` is {number}, but the study has {len(trials)} trials, numbered from 0."
        )
    return trials[number]


def _final_of(
    study: optuna.Study,
    trial: optuna.trial.FrozenTrial,
    folder: str | os.PathLike[str] | None,
) -> Path:
    roots = folders_of(trial) if folder is None else [argument_path("folder", folder)]
    paths = [StudyFolder(Path(root), study.study_name).final(trial.number) for root in roots]
    for path in paths:
        if path.exists():
            return path
    if not paths:
        raise FleetConfigError(
            f"Trial {trial.number} left no checkpoint, because it ran without a folder for it: "
            "use FleetExecutor(..., checkpoints=FOLDER), and trial.prepare() in the objective."
        )
    raise FleetConfigError(
        f"Trial {trial.number} has no checkpoint at {paths[-1]}: only the best trials, as many as "
        "Checkpoints(keep=...) says, keep theirs, if they use trial.prepare(). If the folder was "
        "moved, say where it is: `folder=`."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A checkpoint in a folder.

    Attributes:
        path: The file.
        study: Name of its study.
        trial: Number of its trial.
        kind: "final", or "unfinished": by itself, "the one before" it, or the trial "at its best".
        epoch: How many epochs its trial had done, in its last loop; None if that can't be read.
        num_bytes: Size of the file.
        age_s: Seconds since it was written.
        problem: What is wrong with it, or None.
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
    """The checkpoints in a folder; without `verify`, their payload is not read."""
    return [
        entry
        for folder, study in study_folders(root).items()
        for path in files_in(folder)
        if (entry := _entry(study, path, verify=verify)) is not None
    ]


def _entry(study: str, path: Path, *, verify: bool) -> Entry | None:
    match = _FILE.fullmatch(path.name)
    if match is None:
        return None
    epoch, problem = None, None
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # none of ours; one that nobody writes to, say
            return None
        is_named = StudyFolder(path.parents[1], study).path.name == path.parent.name
        owner = Owner(study=study, trial=int(match[1])) if is_named else None
        epoch = inspect(path, owner, verify=verify).epoch
    except FileNotFoundError:  # its driver has just removed it
        return None
    except CheckpointError as error:
        problem = str(error)
    return Entry(
        path=path,
        study=study,
        trial=int(match[1]),
        kind=_KINDS[match[2]],
        epoch=epoch,
        num_bytes=status.st_size,
        age_s=max(0.0, time.time() - status.st_mtime),
        problem=problem,
    )


def table(found: Sequence[Entry], *, verified: bool) -> list[str]:
    """The lines of a table of checkpoints, and below it what is wrong with some of them."""
    rows = [("STUDY", "TRIAL", "EPOCH", "SIZE", "AGE", "KIND", "STATE")]
    for entry in found:
        state = "damaged" if entry.problem else "good" if verified else "not verified"
        epoch = "?" if entry.epoch is None else str(entry.epoch)
        size = f"{entry.num_bytes / 1e6:.1f} MB"
        age = f"{entry.age_s / 3600:.1f} h"
        rows.append((_shown(entry.study), str(entry.trial), epoch, size, age, entry.kind, state))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return [*lines, *(entry.problem for entry in found if entry.problem)]


def _shown(name: str) -> str:
    """A study's name, in one line of bearable length, without what a terminal would obey."""
    plain = "".join(c if c.isprintable() else repr(c)[1:-1] for c in name) or "''"
    return plain if len(plain) <= _LONGEST_NAME else plain[: _LONGEST_NAME - 1] + "…"


def prune(root: Path) -> Iterator[Path]:
    """Remove, and yield, all but the good checkpoints of trials that are done.

    Trials that a dead driver left unfinished then begin anew when the same call goes on.

    Raises:
        FleetConfigError: A driver is using the folder, or a file can't be removed.
    """
    with FolderLock(root):
        kept = {e.path for e in entries(root, verify=True) if e.kind == "final" and not e.problem}
        for folder in study_folders(root):
            for path in files_in(folder):
                if path not in kept:
                    _remove(path)
                    yield path


def _remove(path: Path) -> None:
    try:
        path.unlink()
    except OSError as error:
        raise FleetConfigError(f"{path} can't be removed: {error.strerror}.") from error
