"""Loads the weights that the best trial left behind."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna

from optuna_fleet.arguments import check_number, check_that, is_a
from optuna_fleet.arguments import path as argument_path
from optuna_fleet.checkpoints.file import Owner
from optuna_fleet.checkpoints.folder import StudyFolder
from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.sampler_bridge.ownership import folders_of

if TYPE_CHECKING:
    import torch


def load_best_model(
    study: optuna.Study,
    model: torch.nn.Module | None = None,
    *,
    name: str | None = None,
    trial: int | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> Any:
    """Load the weights that a study's best trial left behind.

    It must have run with ``FleetExecutor(checkpoints=FOLDER)`` and have used ``trial.prepare``;
    the best trials, as many as `Checkpoints` keeps, leave their weights. A trial that returns the
    best of the values it reported leaves those with which it reported it; any other its last ones.

    Args:
        study: The study.
        model: The module to load them into, built as in the objective. None if you want the bare
            state.
        name: Which of the objects that the objective prepared: the keyword under which it did
            (``trial.prepare(model, ema=ema)``), or its type's name if no other has that. Needed
            where it prepared several modules.
        trial: Number of another trial than the best; needed where there are several objectives.
        folder: Where the checkpoints are now, if they were moved since.

    Returns:
        `model`, on the device where it was; or, without it, a list with the ``state_dict`` of each
        object that the trial prepared, in that order, on the CPU; or that of `name`.

    Raises:
        FleetConfigError: The trial left no checkpoint; there is no such object, or it was not said
            which of several is meant.
        CheckpointError: The checkpoint is damaged, or of another trial.
        RuntimeError: The weights do not fit the module (raised by torch).
    """
    import torch

    from optuna_fleet.trainer import checkpoint
    from optuna_fleet.trainer.states import load_state

    check_that("study", study, is_a(optuna.Study), "be a study, as of optuna.load_study()")
    check_number("trial", trial, whole=True, optional=True)
    check_that("name", name, is_a(str), "be what the objective calls it, as 'ema'", optional=True)
    check_that("model", model, is_a(torch.nn.Module), "be a torch.nn.Module", optional=True)
    chosen = study.best_trial if trial is None else _numbered(study, trial)
    path = _final_of(study, chosen, folder)
    owner = Owner(study=study.study_name, trial=chosen.number)
    loaded = checkpoint.load(path, owner).content
    positions = loaded.modules if name is None else [_position_of(name, loaded.names)]
    if model is None:
        return loaded.objects if name is None else loaded.objects[positions[0]]
    if len(positions) != 1:
        there = ", ".join(f"`{loaded.names[position]}`" for position in loaded.modules)
        raise FleetConfigError(
            f"Trial {chosen.number} has prepared {len(positions)} modules ({there}): say which "
            "one `model` is, as load_best_model(study, model, name=...)."
        )
    load_state(model, loaded.objects[positions[0]])
    return model


def _position_of(name: str, names: Sequence[str]) -> int:
    if names.count(name) == 1:
        return names.index(name)
    there = ", ".join(f"`{each}`" for each in names)
    how_often = "several objects" if name in names else "no object"
    raise FleetConfigError(
        f"`name` is {name!r}, but the trial has prepared {how_often} of that name: {there}. "
        "trial.prepare(model, optimizer, ema=ema) gives them names."
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
    folders = [StudyFolder(Path(root), study.study_name) for root in roots]
    path = Path()
    for there in folders:
        path = there.final(trial.number)
        if trial.number in there.finals():
            return path
    if not folders:
        raise FleetConfigError(
            f"Trial {trial.number} left no checkpoint, because it ran without a folder for it: "
            "use FleetExecutor(..., checkpoints=FOLDER), and trial.prepare() in the objective."
        )
    raise FleetConfigError(
        f"Trial {trial.number} has no checkpoint at {path}: only the best trials, as many as "
        "Checkpoints(keep=...) says, keep theirs, if they use trial.prepare(). If the folder was "
        "moved, say where it is: `folder=`."
    )
