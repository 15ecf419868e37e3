"""The accuracy of a digit reader against what it costs to run.

python examples/ports/pytorch_multi_objective.py [--fleet]
"""

import optuna
import torch
import torch.nn.functional as F
from digits_data import get_loaders, parse_arguments, print_summary
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from optuna_fleet import FleetExecutor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPOCHS = 5


def define_model(trial):
    layers = []
    in_features = 64
    for i in range(trial.suggest_int("n_layers", 1, 3)):
        out_features = trial.suggest_int(f"n_units_l{i}", 4, 128, log=True)
        layers += [nn.Linear(in_features, out_features), nn.ReLU()]
        in_features = out_features
    return nn.Sequential(*layers, nn.Linear(in_features, 10))


def count_flops(model):
    """Return the floating point operations that one digit takes."""
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 64, device=DEVICE))
    return counter.get_total_flops()


def objective(trial):
    torch.manual_seed(trial.number)
    model = define_model(trial).to(DEVICE)
    lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    train_loader, val_loader = get_loaders(batch_size=32)

    for _ in range(EPOCHS):
        for images, labels in train_loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images.to(DEVICE)), labels.to(DEVICE)).backward()
            optimizer.step()

    correct = total = 0
    with torch.no_grad():
        for images, labels in val_loader:
            correct += int((model(images.to(DEVICE)).argmax(dim=1) == labels.to(DEVICE)).sum())
            total += len(labels)

    return count_flops(model), correct / total


def main():
    arguments = parse_arguments(__doc__)
    study = optuna.create_study(directions=["minimize", "maximize"], storage=arguments.storage)
    executor = FleetExecutor(devices=arguments.devices) if arguments.fleet else None
    study.optimize(objective, n_trials=arguments.trials, executor=executor)
    print_summary(study)


if __name__ == "__main__":
    main()
