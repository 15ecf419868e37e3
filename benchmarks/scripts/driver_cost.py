"""What the driver costs while four trials train: share of a core, memory beyond the script's."""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path

import optuna
import sklearn.datasets
import sklearn.model_selection  # noqa: F401
import torchvision.transforms.v2  # noqa: F401
import workload

NUM_SLOTS = 4


def resident_mb() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def main() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    seconds = float(sys.argv[1])
    before_mb = resident_mb()
    import digits  # which imports ours

    from optuna_fleet import FleetExecutor, SharedPipeline

    train, _ = digits.load_datasets()
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
    with FleetExecutor(SharedPipeline(train=train), devices=NUM_SLOTS, device_type="cpu") as fleet:
        study.optimize(
            partial(workload.train, num_epochs=1), n_trials=NUM_SLOTS, executor=fleet
        )  # warm
        cpu_s, began = time.process_time(), time.perf_counter()
        objective = partial(workload.train, num_epochs=1_000_000, stop_after_s=seconds)
        study.optimize(objective, n_trials=NUM_SLOTS, executor=fleet)
        wall_s = time.perf_counter() - began
        share = (time.process_time() - cpu_s) / wall_s
        memory_mb = resident_mb() - before_mb
    reports = sum(len(t.intermediate_values) for t in study.trials[NUM_SLOTS:])
    answer = {"share": share, "memory_mb": memory_mb, "wall_s": wall_s, "reports": reports}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
