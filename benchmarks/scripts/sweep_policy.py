"""A real sweep under one policy; prints how long it took, and how many trials were pruned.

Usage: sweep_policy.py SWEEP POLICY SEED. Parameters and who is pruned depend on the seed alone.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import digits
import nas_images
import optuna

from optuna_fleet import FleetExecutor

NUM_SLOTS = 4


class PrunedByNumber(optuna.pruners.BasePruner):
    """Stops three quarters of the trials, after 1, 2 and 4 epochs."""

    def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
        """Whether the trial is one of those, and has come so far."""
        last = (1, 2, 4, None)[trial.number % 4]
        return last is not None and len(trial.intermediate_values) >= last


def sweep_digits(pruner: optuna.pruners.BasePruner) -> tuple[Any, ...]:
    return digits.make_pipeline(), digits.objective, 24, pruner


def sweep_photographs(folder: Path) -> tuple[Any, ...]:
    classes = nas_images.find_photographs(nas_images.make_photographs(folder), None)
    space = nas_images.SPACES["small"]
    train, val = nas_images.split(classes)
    pipeline = nas_images.make_pipeline(train, val, image_size=space.image_size)
    objective = partial(
        nas_images.objective,
        space=space,
        num_classes=len(classes),
        num_epochs=space.num_epochs,
    )
    return pipeline, objective, space.num_trials, optuna.pruners.NopPruner()


def main() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sweep, policy, seed = sys.argv[1:]
    with TemporaryDirectory() as folder:
        pipeline, objective, num_trials, pruner = {
            "digits": lambda: sweep_digits(optuna.pruners.NopPruner()),
            "digits-pruned": lambda: sweep_digits(PrunedByNumber()),
            "photographs": lambda: sweep_photographs(Path(folder) / "photographs"),
        }[sweep]()
        study = optuna.create_study(
            direction="maximize",
            sampler=optuna.samplers.RandomSampler(seed=int(seed)),
            pruner=pruner,
        )
        with FleetExecutor(pipeline, devices=NUM_SLOTS, device_type="cpu", policy=policy) as fleet:
            study.optimize(objective, n_trials=num_trials, executor=fleet)
        assert fleet.summary is not None
        print(json.dumps({"duration_s": fleet.summary.duration_s, **fleet.summary.trials}))


if __name__ == "__main__":
    main()
