"""A trial that moves goes on where its checkpoint is; it trains no epoch twice."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import optuna
import torch

from tests.fleets import Leg, small_model, train_epoch


def notes_its_epochs(trial: Any, *, note: Path) -> float:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = trial.prepare(model, optimizer)
    for epoch in trial.epochs(4):
        train_epoch(trial, model, optimizer, [], batch_size=10)
        if trial.rank == 0:
            with note.open("a") as file:
                file.write(f"{epoch} ")
    return 0.0


def test_each_epoch_is_trained_once(fleet: Any, tmp_path: Path) -> None:
    fleet.script = {0: [Leg((0,), 1), Leg((1, 2), 3), Leg((3,))]}
    objective = functools.partial(notes_its_epochs, note=tmp_path / "epochs")
    optuna.create_study().optimize(objective, n_trials=1, executor=fleet)
    assert (tmp_path / "epochs").read_text().split() == ["0", "1", "2", "3"]
