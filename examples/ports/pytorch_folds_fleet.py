"""Tumours that are missed against false alarms, each counted over five folds of a table.

python examples/ports/pytorch_folds_fleet.py --trials 40

Beside pytorch_folds_simple.py: a trial may use several devices, is checkpointed and resumed where
its process dies, and all trials share one pipeline of data. A trial that goes on elsewhere runs
the loop over its folds again: those that are trained already are only evaluated.
"""

import functools

import optuna
import torch
import torch.nn.functional as F
from digits_data import parse_arguments, print_summary
from pytorch_folds_data import load_folds
from torch import nn

from optuna_fleet import FleetExecutor, SharedPipeline

BATCH_SIZE = 64
EPOCHS = 10


def define_model(trial):
    hidden = trial.suggest_int("hidden", 4, 64, log=True)
    dropout = trial.suggest_float("dropout", 0.0, 0.5)
    return nn.Sequential(
        nn.Linear(30, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, 1), nn.Flatten(0)
    )


def objective(trial, num_epochs=EPOCHS):
    lr = trial.suggest_float("lr", 1e-3, 1e-1, log=True)
    weight = torch.tensor(trial.suggest_float("weight_of_malign", 0.2, 5.0, log=True))
    missed = alarms = malign = benign = 0

    for fold in range(len(load_folds())):
        torch.manual_seed(trial.number)
        model = define_model(trial)
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        model, optimizer = trial.prepare(model, optimizer)

        for _ in trial.epochs(num_epochs):
            for rows, labels in trial.batches(f"train_{fold}", BATCH_SIZE):
                optimizer.zero_grad()
                logits = model(rows)
                F.binary_cross_entropy_with_logits(logits, labels, pos_weight=weight).backward()
                optimizer.step()

        model.eval()
        with torch.no_grad():
            for rows, labels in trial.batches(f"val_{fold}", BATCH_SIZE):
                found = (model(rows) > 0).float()
                missed += int((labels * (1 - found)).sum())
                alarms += int(((1 - labels) * found).sum())
                malign += int(labels.sum())
                benign += int((1 - labels).sum())

    return trial.sum(missed) / trial.sum(malign), trial.sum(alarms) / trial.sum(benign)


def main():
    arguments = parse_arguments(__doc__, EPOCHS)
    trained = functools.partial(objective, num_epochs=arguments.epochs)
    study = optuna.create_study(directions=["minimize", "minimize"], storage=arguments.storage)
    folds = {f"train_{fold}": train for fold, (train, _) in enumerate(load_folds())}
    folds |= {f"val_{fold}": val for fold, (_, val) in enumerate(load_folds())}
    executor = FleetExecutor(SharedPipeline(**folds), devices=arguments.devices)
    study.optimize(trained, n_trials=arguments.trials, executor=executor)
    print_summary(study)


if __name__ == "__main__":
    main()
