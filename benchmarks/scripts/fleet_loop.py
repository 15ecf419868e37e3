"""One warm executor on one device: for each line `num_epochs`, optimize one trial.

Each trial gets a data set of its own, so that no epoch is in the pipeline's memory already.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from typing import Any

import digits
import optuna
import workload

from optuna_fleet import FleetExecutor, SharedPipeline


def main() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    train, _ = digits.load_datasets()
    names = [f"train{number}" for number in range(int(sys.argv[1]))]
    datasets: dict[str, Any] = dict.fromkeys(names, train)
    pipeline = SharedPipeline(num_preprocessors=1, **datasets)
    with FleetExecutor(pipeline, devices=1, device_type="cpu") as fleet:
        for name, line in zip(names, sys.stdin, strict=False):
            objective = partial(workload.train, num_epochs=int(line), data=name)
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
