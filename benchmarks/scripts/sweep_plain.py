"""One process of a plain Optuna sweep: takes trials from a journal, one after the other."""

from __future__ import annotations

import json
import sys
from typing import Any

import digits
import optuna
import torch
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from plain_trial import PlainTrial, loader

STUDY = "digits"


def train(trial: optuna.Trial, datasets: tuple[Any, Any], num_workers: int) -> float:
    """Train one trial for the epochs it had on the fleet, with DataLoaders of its own."""
    torch.manual_seed(trial.number)
    loaders = {
        name: loader(dataset, size, shuffle=name == "train", num_workers=num_workers)
        for name, dataset, size in zip(("train", "val"), datasets, (32, 120), strict=True)
    }
    return digits.objective(PlainTrial(trial, loaders, trial.user_attrs["num_epochs"]))


def main() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    journal, num_workers = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    datasets = digits.load_datasets()
    storage = JournalStorage(JournalFileBackend(journal))
    study = optuna.load_study(
        study_name=STUDY, storage=storage, sampler=optuna.samplers.RandomSampler(seed=0)
    )
    count = 0
    while "num_epochs" in (trial := study.ask()).user_attrs:  # else the queue is empty
        study.tell(trial, train(trial, datasets, num_workers))
        count += 1
    study.tell(trial, state=optuna.trial.TrialState.FAIL)
    print(json.dumps(count))


if __name__ == "__main__":
    main()
