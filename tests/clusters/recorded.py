"""A sweep whose records depend on nothing but its trials, wherever and whenever these train."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import optuna
import torch
from optuna.trial import FrozenTrial

from optuna_fleet import FleetExecutor
from tests.behaviour.samplers import ByNumber
from tests.fleets import evaluate, num_wrong, small_model, small_pipeline, train_epoch

EPOCHS = 8
NUM_TRIALS = 4


def objective(trial: Any, *, before: Callable[[int], object] = lambda epoch: None) -> float:
    """Train; do something before each epoch."""
    assert "OPTUNA_FLEET_TOKEN" not in os.environ  # it would be told by whoever logs variables
    model = small_model()
    lr = trial.suggest_float("lr", 0.001, 0.05)
    model, optimizer = trial.prepare(model, torch.optim.SGD(model.parameters(), lr, momentum=0.9))
    losses = trial.state.setdefault("losses", [])
    for epoch in trial.epochs(EPOCHS):
        before(epoch)
        train_epoch(trial, model, optimizer, losses, batch_size=10)
        trial.report(evaluate(trial, model, num_wrong) / 20, epoch)
        if trial.should_prune():
            trial.set_user_attr("losses", losses)
            raise optuna.TrialPruned
    trial.set_user_attr("losses", losses)
    return float(losses[-1])


class Acting(optuna.pruners.ThresholdPruner):
    """Prunes by the trial's own report; does something each time that it is asked."""

    def __init__(self, act: Callable[[int, int], object] = lambda number, epoch: None) -> None:
        super().__init__(upper=0.68, n_warmup_steps=2)
        self._act = act

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        self._act(trial.number, trial.last_step or 0)
        return super().prune(study, trial)


def run(
    fleet: FleetExecutor,
    objective: Callable[[Any], float] = objective,
    *,
    storage: str | None = None,
    act: Callable[[int, int], object] = lambda number, epoch: None,
) -> list[float]:
    """All numbers of the sweep, or of what was left of it."""
    study = optuna.create_study(
        study_name="s",
        storage=storage,
        load_if_exists=True,
        sampler=ByNumber(),
        pruner=Acting(act),
    )
    study.optimize(objective, n_trials=NUM_TRIALS, executor=fleet)
    return numbers_of(study)


def undisturbed() -> list[float]:
    """All numbers of the sweep, on one machine."""
    with FleetExecutor(small_pipeline(), devices=2, device_type="cpu") as fleet:
        return run(fleet)


def numbers_of(study: optuna.Study) -> list[float]:
    """States, parameters, reports and losses."""
    return [
        number
        for t in study.trials
        for number in (
            t.state.value,
            *t.params.values(),
            *t.intermediate_values.keys(),
            *t.intermediate_values.values(),
            *t.user_attrs["losses"],
        )
    ]
