"""The README's objective is run as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import optuna
import torch
from torch import nn

import optuna_fleet
from tests.fleets import Noise

ROOT = Path(__file__).parents[1]


def build_model(depth: int, width: int) -> nn.Module:
    assert 8 <= depth <= 50
    return nn.Sequential(
        nn.Flatten(), nn.Linear(36, width), nn.ReLU(), nn.Linear(width, 3)
    ).double()


def count_correct(model: nn.Module, batches: Any) -> tuple[int, int]:
    correct = total = 0
    with torch.no_grad():
        for x, y in batches:
            correct += int((model(x).argmax(1) == y).sum())
            total += len(y)
    return correct, total


def test_the_readmes_objective_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    (source,) = [block for block in blocks if "def objective" in block]
    train_set, val_set = Noise(41, augment=True), Noise(20)
    names = {"build_model": build_model, "count_correct": count_correct}
    exec(source, names)
    pipeline = names["SharedPipeline"](train=train_set, val=val_set)  # type: ignore[operator]
    study = optuna.create_study(direction="maximize")
    executor = names["FleetExecutor"](pipeline, cluster="inline")  # type: ignore[operator]
    study.optimize(names["objective"], n_trials=1, executor=executor)  # type: ignore[call-arg]
    assert 0 <= study.best_value <= 1


def test_the_version_is_that_of_the_package() -> None:
    assert f'version = "{optuna_fleet.__version__}"' in (ROOT / "pyproject.toml").read_text()
