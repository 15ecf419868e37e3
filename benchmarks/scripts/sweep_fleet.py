"""The sweep of `examples/digits.py`; prints what each trial was, and the summary."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import digits
import optuna

from optuna_fleet import FleetExecutor


def main() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    num_trials, num_slots, seed = map(int, sys.argv[1:])
    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=seed),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=2),
    )
    with FleetExecutor(digits.make_pipeline(), devices=num_slots, device_type="cpu") as fleet:
        study.optimize(digits.objective, n_trials=num_trials, executor=fleet)
    assert fleet.summary is not None
    trials = [
        {"params": trial.params, "num_epochs": len(trial.intermediate_values)}
        for trial in study.trials
    ]
    share = {"probing_share": fleet.summary.probing_share}
    print(json.dumps({"trials": trials, "summary": asdict(fleet.summary) | share}))


if __name__ == "__main__":
    main()
