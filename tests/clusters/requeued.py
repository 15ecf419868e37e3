"""A sweep whose records depend on nothing but its trials, run by a job that is requeued."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import optuna
import torch

from optuna_fleet import Checkpoints, FleetExecutor
from tests.fleets import evaluate, num_wrong, small_model, small_pipeline, train_epoch
from tests.samplers import ByNumber
from tests.waiting import until

EPOCHS = 8
NUM_TRIALS = 4


def objective(trial: Any) -> float:
    """Train; in a job say when a trial is in its midst, and wait there until the job is told."""
    model = small_model()
    lr = trial.suggest_float("lr", 0.001, 0.05)
    model, optimizer = trial.prepare(model, torch.optim.SGD(model.parameters(), lr, momentum=0.9))
    losses = trial.state.setdefault("losses", [])
    for epoch in trial.epochs(EPOCHS):
        if epoch == 3 and "SLURM_JOB_ID" in os.environ:
            until(Path("told").exists)
        train_epoch(trial, model, optimizer, losses, batch_size=10)
        trial.report(evaluate(trial, model, num_wrong) / 20, epoch)
        if epoch == 2:
            Path("midst").touch()
        if trial.should_prune():
            trial.set_user_attr("losses", losses)
            raise optuna.TrialPruned
    trial.set_user_attr("losses", losses)
    return float(losses[-1])


def run(storage: str | None, **options: Any) -> optuna.Study:
    """The sweep, or what is left of it."""
    study = optuna.create_study(
        study_name="s",
        storage=storage,
        load_if_exists=True,
        sampler=ByNumber(),
        pruner=optuna.pruners.ThresholdPruner(upper=0.68, n_warmup_steps=2),
    )
    with FleetExecutor(small_pipeline(), devices=2, device_type="cpu", **options) as fleet:
        study.optimize(objective, n_trials=NUM_TRIALS, executor=fleet)
    return study


if __name__ == "__main__":
    run("sqlite:///s.db", cluster="slurm", checkpoints=Checkpoints("checkpoints", interval_s=0.0))
