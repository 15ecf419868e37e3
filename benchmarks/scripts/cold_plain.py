"""Cold start of an objective that needs no torch: seconds from `optimize` to its first line."""

from __future__ import annotations

import json
import time
from typing import Any

import optuna

from optuna_fleet import FleetExecutor


def objective(trial: Any) -> float:
    return time.time()


def main() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler())
    with FleetExecutor(devices=4, device_type="cpu") as fleet:
        began = time.time()
        study.optimize(objective, n_trials=4, executor=fleet)
    print(json.dumps(min(trial.value for trial in study.trials) - began))


if __name__ == "__main__":
    main()
