"""Cold start of four CPU slots: seconds from `optimize` to the first step of each slot."""

from __future__ import annotations

import json
import time

import digits
import optuna
import workload

from optuna_fleet import FleetExecutor, SharedPipeline

NUM_SLOTS = 4


def main() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    train, _ = digits.load_datasets()
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler())
    with FleetExecutor(SharedPipeline(train=train), devices=NUM_SLOTS, device_type="cpu") as fleet:
        began = time.time()
        study.optimize(workload.first_step, n_trials=NUM_SLOTS, executor=fleet)
    steps = sorted(trial.user_attrs["first_step"] - began for trial in study.trials)
    print(json.dumps({"first_s": steps[0], "last_s": steps[-1]}))


if __name__ == "__main__":
    main()
