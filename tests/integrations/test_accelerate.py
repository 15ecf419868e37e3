"""A loop written with Accelerate runs unchanged, each trial on one device."""

from __future__ import annotations

from typing import Any

import optuna
import pytest
import torch
import torch.nn.functional as F

accelerate = pytest.importorskip("accelerate")

from optuna_fleet import FleetExecutor  # noqa: E402
from tests.fleets import Noise, small_model  # noqa: E402


def by_accelerate(trial: Any) -> float:
    accelerator = accelerate.Accelerator(cpu=True)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=trial.suggest_float("lr", 0.01, 0.1))
    loader = torch.utils.data.DataLoader(Noise(20), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(2):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        trial.report(loss.item(), epoch)
    return loss.item()


def test_it_runs_on_a_fleet() -> None:
    study = optuna.create_study()
    executor = FleetExecutor(devices=1, cluster="inline")
    study.optimize(by_accelerate, n_trials=1, executor=executor)
    assert list(study.trials[0].intermediate_values) == [0, 1]
