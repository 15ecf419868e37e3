"""Tumours that are missed against false alarms, each counted over five folds of a table.

python examples/ports/pytorch_folds_simple.py          # one trial after the other
python examples/ports/pytorch_folds_simple.py --fleet  # side by side, on all devices

pytorch_folds_fleet.py is this file with trials that can use several devices each.
"""

import functools

import optuna
import torch
import torch.nn.functional as F
from digits_data import parse_arguments, print_summary
from pytorch_folds_data import load_folds
from torch import nn
from torch.utils.data import DataLoader

from optuna_fleet import FleetExecutor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
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

    for train, val in load_folds():
        torch.manual_seed(trial.number)
        model = define_model(trial).to(DEVICE)
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        train_loader = DataLoader(train, BATCH_SIZE, shuffle=True)
        val_loader = DataLoader(val, BATCH_SIZE)

        for _ in range(num_epochs):
            for rows, labels in train_loader:
                rows, labels = rows.to(DEVICE), labels.to(DEVICE)
                optimizer.zero_grad()
                logits = model(rows)
                F.binary_cross_entropy_with_logits(logits, labels, pos_weight=weight).backward()
                optimizer.step()

        model.eval()
        with torch.no_grad():
            for rows, labels in val_loader:
                rows, labels = rows.to(DEVICE), labels.to(DEVICE)
                found = (model(rows) > 0).float()
                missed += int((labels * (1 - found)).sum())
                alarms += int(((1 - labels) * found).sum())
                malign += int(labels.sum())
                benign += int((1 - labels).sum())

    return missed / malign, alarms / benign


def main():
    arguments = parse_arguments(__doc__, EPOCHS)
    trained = functools.partial(objective, num_epochs=arguments.epochs)
    study = optuna.create_study(directions=["minimize", "minimize"], storage=arguments.storage)
    executor = FleetExecutor(devices=arguments.devices) if arguments.fleet else None
    study.optimize(trained, n_trials=arguments.trials, executor=executor)
    print_summary(study)


if __name__ == "__main__":
    main()
