"""The README's script is run as it stands, before its change and after."""

from __future__ import annotations

import re
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import optuna_fleet
from tests.fleets import Noise

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def build_model(depth: int) -> nn.Module:
    assert 8 <= depth <= 50
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 3)).double()


def count_correct(model: nn.Module, batches: Any) -> tuple[int, int]:
    correct = total = 0
    with torch.no_grad():
        for x, y in batches:
            correct += int((model(x).argmax(1) == y).sum())
            total += len(y)
    return correct, total


def lines(before_or_after: str) -> list[str]:
    """The script of the README without what the other side of its diff has."""
    (diff,) = re.findall(r"```diff\n(.*?)```", README, re.S)
    return [line[1:] for line in diff.splitlines() if line[:1] in ("", " ", before_or_after)]


def optimized(side: str) -> optuna.Study:
    script = "\n".join(lines(side)).replace("n_trials=100", "n_trials=1")
    study = optuna.create_study(direction="maximize")
    names = {
        **{used.__name__: used for used in (build_model, count_correct, DataLoader)},
        "optuna": optuna,
        "torch": torch,
        "F": F,
        "DEVICE": "cpu",
        "study": study,
        "train_set": Noise(41, augment=True),
        "val_set": Noise(20),
    }
    exec(script.replace("num_workers=8", "num_workers=0"), names)
    return study


def test_the_readmes_objective_runs_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(optimized("-").trials[0].intermediate_values) == 30

    inline = partial(optuna_fleet.FleetExecutor, cluster="inline")
    monkeypatch.setattr(optuna_fleet, "FleetExecutor", inline)
    assert len(optimized("+").trials[0].intermediate_values) == 30


def test_an_unchanged_objective_runs_with_executor_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    optimize = partialmethod(
        optuna.Study.optimize, executor=optuna_fleet.FleetExecutor(cluster="inline")
    )
    monkeypatch.setattr(optuna.Study, "optimize", optimize)
    assert len(optimized("-").trials[0].intermediate_values) == 30


def test_as_many_lines_are_changed_as_it_says() -> None:
    before, after = lines("-"), lines("+")
    changed = [line for line in after if line and line not in before]
    assert len(changed) == 9
    assert "nine lines changed" in README


def test_the_version_is_that_of_the_package() -> None:
    assert f'version = "{optuna_fleet.__version__}"' in (ROOT / "pyproject.toml").read_text()
