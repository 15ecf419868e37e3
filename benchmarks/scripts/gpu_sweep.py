"""A short sweep of `examples/digits.py`: with one trainer on the device, then with several."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections import Counter
from functools import partial

import digits
import optuna

from optuna_fleet import FleetExecutor, LocalCluster


def main() -> None:
    device = sys.argv[1]
    num_epochs, num_trials = (1, 2) if device == "cpu" else (4, 12)
    objective = partial(digits.objective, num_epochs=num_epochs)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    policy = "mip" if importlib.util.find_spec("mip") else "greedy"
    print(f"{num_trials} trials, policy {policy!r}; with the start of all processes:\n")
    print("| trainers on the device | s | best | states | busy s | waited for data s | sharing |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for slots in (1, 2) if device == "cpu" else (1, 2, 4):
        study = optuna.create_study(
            direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0)
        )
        began = time.perf_counter()
        with FleetExecutor(
            digits.make_pipeline(),
            devices=1,
            device_type=device,
            cluster=LocalCluster(slots_per_device=slots),
            policy=policy,
        ) as fleet:
            study.optimize(objective, n_trials=num_trials, executor=fleet)
        wall_s = time.perf_counter() - began
        assert fleet.summary is not None
        states = Counter(trial.state.name for trial in study.trials)
        print(
            f"| {slots} | {wall_s:.1f} | {study.best_value:.3f} | {dict(states)} "
            f"| {sum(fleet.summary.busy_s.values()):.1f} "
            f"| {sum(fleet.summary.waited_s.values()):.1f} "
            f"| {fleet.summary.sharing_factor:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
