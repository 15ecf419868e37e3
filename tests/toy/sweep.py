"""Trials on two accelerators of a kind of which there is only an entry (`sitecustomize`)."""

from __future__ import annotations

import os
from typing import Any

import optuna
import torch

from optuna_fleet import FleetExecutor, SharedPipeline
from optuna_fleet.exceptions import is_of_device


def train(trial: Any) -> int:
    model = torch.nn.Linear(4, 1, device=trial.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trial.prepare(model, optimizer)
    seen = 0
    for _ in trial.epochs(2):
        for batch in trial.batches("train", 4):
            assert batch.device.type == "meta"
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            seen += len(batch)
    trial.set_user_attr("sees", os.environ["TOY_VISIBLE_DEVICES"])
    trial.set_user_attr("watchdog", os.environ["TOY_WATCHDOG"])
    trial.set_user_attr("marks", torch.meta.Event.call_count)  # type: ignore[attr-defined]
    return seen


if __name__ == "__main__":
    study, data = optuna.create_study(), [torch.zeros(4)] * 16
    with FleetExecutor(SharedPipeline(train=data), preflight=False) as fleet:
        study.optimize(train, n_trials=4, executor=fleet)
    for trial in study.trials:
        assert (trial.value, trial.user_attrs["watchdog"]) == (32, "0")
        assert trial.user_attrs["marks"] > 0
    assert {trial.user_attrs["sees"] for trial in study.trials} == {"0", "1"}
    assert is_of_device(RuntimeError("the toy is broken"))
