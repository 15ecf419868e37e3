"""Trials that return at once: extra seconds per trial over plain Optuna, in alternation."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import optuna

from optuna_fleet import FleetExecutor


def objective(trial: Any) -> float:
    return float(trial.suggest_float("x", 0.0, 1.0))


def per_trial_s(num_trials: int, **options: Any) -> float:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    began = time.perf_counter()
    study.optimize(objective, n_trials=num_trials, **options)
    return (time.perf_counter() - began) / num_trials


def main() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    num_rounds, num_trials = map(int, sys.argv[1:])
    with FleetExecutor(devices=1, device_type="cpu") as fleet:
        per_trial_s(1, executor=fleet)
        pairs = [
            (per_trial_s(num_trials, executor=fleet), per_trial_s(num_trials))
            for _ in range(num_rounds)
        ]
    print(json.dumps([ours - theirs for ours, theirs in pairs]))


if __name__ == "__main__":
    main()
