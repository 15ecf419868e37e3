"""Depth, width, dropout and optimizer of a perceptron that reads digits.

python examples/ports/pytorch_simple_fleet.py --trials 40

Beside pytorch_simple.py: a trial may use several devices, is checkpointed and resumed where its
process dies, and all trials share one pipeline of data.
"""

import optuna
import torch
import torch.nn.functional as F
from digits_data import load_datasets, parse_arguments, print_summary
from torch import nn

from optuna_fleet import FleetExecutor, SharedPipeline

BATCH_SIZE = 32
EPOCHS = 10


def define_model(trial):
    layers = []
    in_features = 64
    for i in range(trial.suggest_int("n_layers", 1, 3)):
        out_features = trial.suggest_int(f"n_units_l{i}", 8, 128, log=True)
        dropout = trial.suggest_float(f"dropout_l{i}", 0.0, 0.5)
        layers += [nn.Linear(in_features, out_features), nn.ReLU(), nn.Dropout(dropout)]
        in_features = out_features
    return nn.Sequential(*layers, nn.Linear(in_features, 10))


def objective(trial):
    model = define_model(trial)
    optimizer_class = trial.suggest_categorical("optimizer", ["Adam", "RMSprop", "SGD"])
    lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    optimizer = getattr(torch.optim, optimizer_class)(model.parameters(), lr=lr)
    model, optimizer = trial.prepare(model, optimizer)

    for epoch in trial.epochs(EPOCHS):
        model.train()
        for images, labels in trial.batches("train", BATCH_SIZE):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()

        model.eval()
        correct = total = 0
        with torch.no_grad():
            for images, labels in trial.batches("val", BATCH_SIZE):
                correct += int((model(images).argmax(dim=1) == labels).sum())
                total += len(labels)
        accuracy = trial.sum(correct) / trial.sum(total)

        trial.report(accuracy, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned

    return accuracy


def main():
    arguments = parse_arguments(__doc__)
    study = optuna.create_study(direction="maximize", storage=arguments.storage)
    train, val = load_datasets()
    executor = FleetExecutor(SharedPipeline(train=train, val=val), devices=arguments.devices)
    study.optimize(objective, n_trials=arguments.trials, executor=executor)
    print_summary(study)


if __name__ == "__main__":
    main()
