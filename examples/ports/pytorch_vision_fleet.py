"""A convolutional network with mixup and an average of its weights (EMA), which is what is scored.

python examples/ports/pytorch_vision_fleet.py --trials 40

Beside pytorch_vision_simple.py: a trial may use several devices, is checkpointed and resumed where
its process dies, and all trials share one pipeline of data: in an epoch each digit is shifted and
turned once for all of them. Mixup mixes the images of each device's part of a batch.
"""

import functools

import optuna
import torch
import torch.nn.functional as F
from digits_data import parse_arguments, print_summary
from pytorch_vision_data import load_datasets
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from optuna_fleet import FleetExecutor, SharedPipeline

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
    model = define_model(width=trial.suggest_int("width", 8, 32, step=8))
    decay = trial.suggest_float("ema_decay", 0.8, 0.99)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
    lr = trial.suggest_float("lr", 1e-2, 1.0, log=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True)
    total_steps = num_epochs * len(trial.batches("train", BATCH_SIZE))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=total_steps)
    trial.prepare(model, optimizer, scheduler, ema=ema)
    alpha = trial.suggest_float("mixup_alpha", 0.1, 1.0)

    for epoch in trial.epochs(num_epochs):
        model.train()
        for images, labels in trial.batches("train", BATCH_SIZE):
            optimizer.zero_grad()
            mixup_loss(model, images, labels, alpha).backward()
            optimizer.step()
            scheduler.step()
            ema.update_parameters(model)

        ema.eval()
        correct = total = 0
        with torch.no_grad():
            for images, labels in trial.batches("val", 120):
                correct += int((ema(images).argmax(dim=1) == labels).sum())
                total += len(labels)
        accuracy = trial.sum(correct) / trial.sum(total)

        trial.report(accuracy, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned

    return accuracy


def main():
    arguments = parse_arguments(__doc__, EPOCHS)
    trained = functools.partial(objective, num_epochs=arguments.epochs)
    study = optuna.create_study(direction="maximize", storage=arguments.storage)
    train, val = load_datasets()
    executor = FleetExecutor(SharedPipeline(train=train, val=val), devices=arguments.devices)
    study.optimize(trained, n_trials=arguments.trials, executor=executor)
    print_summary(study)


if __name__ == "__main__":
    main()
