"""One warm executor on one device: for each line `num_epochs`, optimize one trial."""

from __future__ import annotations

import json
import sys
import time
from functools import partial

import digits
import optuna
import workload

from optuna_fleet import FleetExecutor, SharedPipeline


def main() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    train, _ = digits.load_datasets()
    pipeline = SharedPipeline(train=train, num_preprocessors=1)
    with FleetExecutor(pipeline, devices=1, device_type="cpu") as fleet:
        for line in sys.stdin:
            objective = partial(workload.train, num_epochs=int(line))
            study = optuna.create_study(sampler=optuna.samplers.RandomSampler())
            began = time.perf_counter()
            study.optimize(objective, n_trials=1, executor=fleet)
            assert fleet.summary is not None
            answer = {
                "wall_s": time.perf_counter() - began,
                "waited_s": fleet.summary.waited_s[0],
                "busy_s": fleet.summary.busy_s[0],
            }
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
