"""Depth, width, dropout and optimizer of a perceptron that reads digits.

python examples/ports/pytorch_simple.py          # one trial after the other
python examples/ports/pytorch_simple.py --fleet  # side by side, on all devices

pytorch_simple_fleet.py is this file with trials that can use several devices each.
"""

import optuna
import torch
import torch.nn.functional as F
from digits_data import get_loaders, parse_arguments, print_summary
from torch import nn

from optuna_fleet import FleetExecutor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
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
    torch.manual_seed(trial.number)
    model = define_model(trial).to(DEVICE)
    optimizer_class = trial.suggest_categorical("optimizer", ["Adam", "RMSprop", "SGD"])
    lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    optimizer = getattr(torch.optim, optimizer_class)(model.parameters(), lr=lr)
    train_loader, val_loader = get_loaders(BATCH_SIZE)

    for epoch in range(EPOCHS):
        model.train()
        for images, labels in train_loader:
            images, labels = images.to(DEVICE), labels.to(DEVICE)
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()

        model.eval()
        correct = total = 0
        with torch.no_grad():
            for images, labels in val_loader:
                images, labels = images.to(DEVICE), labels.to(DEVICE)
                correct += int((model(images).argmax(dim=1) == labels).sum())
                total += len(labels)
        accuracy = correct / total

        trial.report(accuracy, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned

    return accuracy


def main():
    arguments = parse_arguments(__doc__)
    study = optuna.create_study(direction="maximize", storage=arguments.storage)
    executor = FleetExecutor(devices=arguments.devices) if arguments.fleet else None
    study.optimize(objective, n_trials=arguments.trials, executor=executor)
    print_summary(study)


if __name__ == "__main__":
    main()
