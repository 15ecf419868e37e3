"""A short sweep of an example's objective: with one trainer on the device, then with several."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import digits
import nas_images
import optuna

from optuna_fleet import FleetExecutor, LocalCluster, SharedPipeline

Sweep = tuple[Callable[[], SharedPipeline], Callable[[Any], float], int]
"""Data, objective and number of trials."""


def digits_sweep(is_small: bool) -> Sweep:
    objective = partial(digits.objective, num_epochs=1 if is_small else 4)
    return digits.make_pipeline, objective, 2 if is_small else 12


def images_sweep(is_small: bool) -> Sweep:
    folder = nas_images.make_photographs(Path(tempfile.gettempdir()) / "gpu-sweep-photographs")
    classes = nas_images.find_photographs(folder)
    sets = nas_images.split(classes)
    if is_small:
        sets = (sets[0][:32], sets[1][:8])
    pipeline = partial(nas_images.make_pipeline, *sets, image_size=32 if is_small else 64)
    objective = partial(
        nas_images.objective,
        space=nas_images.SPACES["small"],
        num_classes=len(classes),
        num_epochs=1 if is_small else 3,
    )
    return pipeline, objective, 2 if is_small else 8


def main() -> None:
    name, device = sys.argv[1:]
    make = {"digits": digits_sweep, "images": images_sweep}[name]
    data, objective, num_trials = make(device == "cpu")
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
            data(),
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
