"""A convolutional network with mixup and an average of its weights (EMA), which is what is scored.

python examples/ports/pytorch_vision_simple.py          # one trial after the other
python examples/ports/pytorch_vision_simple.py --fleet  # side by side, on all devices

pytorch_vision_fleet.py is this file with trials that can use several devices each.
"""

import functools

import optuna
import torch
import torch.nn.functional as F
from digits_data import parse_arguments, print_summary
from pytorch_vision_data import load_datasets
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from optuna_fleet import FleetExecutor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BATCH_SIZE = 32
EPOCHS = 6


def define_model(width):
    layers = []
    for channels, out_channels in [(1, width), (width, 2 * width)]:
        layers += [nn.Conv2d(channels, out_channels, 3, padding=1, bias=False)]
        layers += [nn.BatchNorm2d(out_channels), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2 * width * 16, 10))


def mixup_loss(model, images, labels, alpha):
    """Mix each image with another of the batch, and the loss likewise."""
    share = torch.distributions.Beta(alpha, alpha).sample()
    other = torch.randperm(len(images), device=images.device)
    outputs = model(share * images + (1 - share) * images[other])
    first, second = (F.cross_entropy(outputs, wanted) for wanted in (labels, labels[other]))
    return share * first + (1 - share) * second


def objective(trial, num_epochs=EPOCHS):
    torch.manual_seed(trial.number)
    model = define_model(width=trial.suggest_int("width", 8, 32, step=8)).to(DEVICE)
    decay = trial.suggest_float("ema_decay", 0.8, 0.99)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
    lr = trial.suggest_float("lr", 1e-2, 1.0, log=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True)
    train, val = load_datasets()
    train_loader, val_loader = DataLoader(train, BATCH_SIZE, shuffle=True), DataLoader(val, 120)
    total_steps = num_epochs * len(train_loader)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=total_steps)
    alpha = trial.suggest_float("mixup_alpha", 0.1, 1.0)

    for epoch in range(num_epochs):
        model.train()
        for images, labels in train_loader:
            images, labels = images.to(DEVICE), labels.to(DEVICE)
            optimizer.zero_grad()
            mixup_loss(model, images, labels, alpha).backward()
            optimizer.step()
            scheduler.step()
            ema.update_parameters(model)

        ema.eval()
        correct = total = 0
        with torch.no_grad():
            for images, labels in val_loader:
                images, labels = images.to(DEVICE), labels.to(DEVICE)
                correct += int((ema(images).argmax(dim=1) == labels).sum())
                total += len(labels)
        accuracy = correct / total

        trial.report(accuracy, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned

    return accuracy


def main():
    arguments = parse_arguments(__doc__, EPOCHS)
    trained = functools.partial(objective, num_epochs=arguments.epochs)
    study = optuna.create_study(direction="maximize", storage=arguments.storage)
    executor = FleetExecutor(devices=arguments.devices) if arguments.fleet else None
    study.optimize(trained, n_trials=arguments.trials, executor=executor)
    print_summary(study)


if __name__ == "__main__":
    main()
