"""A hyperparameter and architecture sweep of CNNs on scikit-learn's handwritten digits.

python examples/digits.py  # 24 trials on 4 device slots, about a minute on 2 cores
python examples/digits.py --trials 60 --devices 8 --picture timeline.html
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import optuna
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torchvision.transforms import v2

from optuna_fleet import FleetExecutor, SharedPipeline, take_apart
from optuna_fleet.visualization import plot_timeline


class Digits(torch.utils.data.Dataset[tuple[Any, int]]):
    """Scanned digits of 8 x 8 pixels, enlarged, shifted and turned a little if `augment`."""

    def __init__(self, images: Any, labels: Any, *, augment: bool) -> None:
        self.images = torch.as_tensor(images, dtype=torch.float32)[:, None] / 16
        self.labels = [int(label) for label in labels]
        steps = [v2.Resize(16, antialias=True), v2.Normalize([0.3], [0.38])]
        if augment:
            steps.insert(1, v2.RandomAffine(degrees=10, translate=(0.08, 0.08), scale=(0.9, 1.1)))
        self.transform = v2.Compose(steps)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.transform(self.images[index]), self.labels[index]


def load_datasets() -> tuple[Digits, Digits]:
    """Return the training set and the held-out set (360 digits)."""
    digits = load_digits()
    train_x, val_x, train_y, val_y = train_test_split(
        digits.images, digits.target, test_size=360, random_state=0, stratify=digits.target
    )
    return Digits(train_x, train_y, augment=True), Digits(val_x, val_y, augment=False)


def make_pipeline() -> SharedPipeline:
    """Return both sets as the trials share them: digits are enlarged once."""
    train, val = load_datasets()
    train, augment, finish = take_apart(train, augment=1, finish=2)
    return SharedPipeline(train=train, val=val, augment=augment, finish={"train": finish})


def build_model(trial: optuna.Trial) -> nn.Module:
    """A stack of convolutions; depth, width and dropout are hyperparameters."""
    width = trial.suggest_int("width", 8, 40, step=8)
    layers: list[nn.Module] = []
    channels = 1
    for level in range(trial.suggest_int("depth", 1, 4)):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        if level % 2 == 0:
            layers.append(nn.MaxPool2d(2))
        channels = width
    layers += [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, 10)]
    return nn.Sequential(*layers)


def build_optimizer(trial: optuna.Trial, model: nn.Module) -> torch.optim.Optimizer:
    """SGD or Adam with a learning rate of its own range."""
    if trial.suggest_categorical("optimizer", ["sgd", "adam"]) == "sgd":
        lr = trial.suggest_float("sgd_lr", 1e-3, 0.5, log=True)
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return torch.optim.Adam(
        model.parameters(), lr=trial.suggest_float("adam_lr", 1e-4, 2e-2, log=True)
    )


def objective(trial: Any, num_epochs: int = 12) -> float:
    """Train one model and return its accuracy on the held-out digits."""
    model = build_model(trial)
    optimizer = build_optimizer(trial, model)
    model, optimizer = trial.prepare(model, optimizer)
    accuracy = 0.0
    for epoch in trial.epochs(num_epochs):
        model.train()
        for images, labels in trial.batches("train", batch_size=32):
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        correct = total = 0
        with torch.no_grad():
            for images, labels in trial.batches("val", batch_size=120):
                correct += int((model(images).argmax(1) == labels).sum())
                total += len(labels)
        accuracy = trial.sum(correct) / trial.sum(total)
        trial.report(accuracy, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    return accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--epochs", type=int, default=12, help="of each trial")
    parser.add_argument("--devices", type=int, help="default: all GPUs, or 4 CPU slots")
    parser.add_argument("--storage", help="Optuna storage URL; default: in memory")
    parser.add_argument("--picture", default="digits.html", help="where to draw the timeline")
    arguments = parser.parse_args()

    if arguments.devices is None and not torch.cuda.device_count():
        arguments.devices = 4

    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=0),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=2),
        storage=arguments.storage,
    )
    with FleetExecutor(make_pipeline(), devices=arguments.devices) as fleet:
        study.optimize(
            functools.partial(objective, num_epochs=arguments.epochs),
            n_trials=arguments.trials,
            executor=fleet,
        )

    print(
        f"Best trial: {study.best_trial.number}, accuracy {study.best_value:.4f} with "
        f"{study.best_params}"
    )
    plot_timeline(study).write_html(arguments.picture)
    print(f"The timeline is drawn in {arguments.picture}.")


if __name__ == "__main__":
    main()
