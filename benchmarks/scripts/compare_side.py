"""One side of `compare.py`: trains the trials; prints their number and the best accuracy."""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from typing import Any

import digits
import optuna
import torch
from plain_trial import PlainTrial, loader

NUM_AT_ONCE = 2


def drawn(num_trials: int, seed: int) -> list[dict[str, Any]]:
    """The parameters of all trials, as `digits` suggests them."""
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    for _ in range(num_trials):
        trial = study.ask()
        space(trial)
    return [trial.params for trial in study.trials]


def train(trial: Any, num_epochs: int) -> float:
    """Train one trial with DataLoaders of its own."""
    torch.set_num_threads(1)
    loaders = {
        name: loader(dataset, size, shuffle=name == "train", num_workers=0)
        for name, dataset, size in zip(
            ("train", "val"), digits.load_datasets(), (32, 120), strict=True
        )
    }
    return digits.objective(PlainTrial(trial, loaders, num_epochs))


def queued(trials: list[dict[str, Any]]) -> optuna.Study:
    study = optuna.create_study(direction="maximize")
    for params in trials:
        study.enqueue_trial(params)
    return study


def by_fleet(trials: list[dict[str, Any]], num_epochs: int) -> list[float]:
    from optuna_fleet import FleetExecutor

    study, pipeline = queued(trials), digits.make_pipeline()
    objective = functools.partial(digits.objective, num_epochs=num_epochs)
    with FleetExecutor(pipeline, devices=NUM_AT_ONCE, device_type="cpu") as fleet:
        study.optimize(objective, n_trials=len(trials), executor=fleet)  # type: ignore[call-arg]
    return [float(trial.value or 0) for trial in study.trials]


def by_optuna(trials: list[dict[str, Any]], num_epochs: int) -> list[float]:
    study = queued(trials)
    objective = functools.partial(train, num_epochs=num_epochs)
    study.optimize(objective, n_trials=len(trials), n_jobs=NUM_AT_ONCE)
    return [float(trial.value or 0) for trial in study.trials]


def space(trial: optuna.Trial) -> None:
    digits.build_optimizer(trial, digits.build_model(trial))


def by_tune(trials: list[dict[str, Any]], num_epochs: int) -> list[float]:
    import ray
    from ray import tune
    from ray.tune.search import ConcurrencyLimiter
    from ray.tune.search.optuna import OptunaSearch

    def objective(config: dict[str, Any]) -> None:
        trial = optuna.trial.FixedTrial(config)
        tune.report({"accuracy": train(trial, num_epochs)})

    ray.init(num_cpus=NUM_AT_ONCE, include_dashboard=False)
    search = OptunaSearch(space, metric="accuracy", mode="max", points_to_evaluate=trials)
    with tempfile.TemporaryDirectory() as folder:
        tuner = tune.Tuner(
            tune.with_resources(objective, {"cpu": 1}),
            tune_config=tune.TuneConfig(
                search_alg=ConcurrencyLimiter(search, NUM_AT_ONCE), num_samples=len(trials)
            ),
            run_config=tune.RunConfig(verbose=0, storage_path=folder),
        )
        results = tuner.fit()
    ray.shutdown()
    return [float(result.metrics["accuracy"]) for result in results]


def main() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    side, *numbers = sys.argv[1:]
    num_trials, num_epochs, seed = map(int, numbers)
    sides = {"fleet": by_fleet, "optuna": by_optuna, "tune": by_tune}
    values = sides[side](drawn(num_trials, seed), num_epochs)
    print(json.dumps({"num_trials": len(values), "best": max(values)}))


if __name__ == "__main__":
    main()
