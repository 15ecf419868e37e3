"""A small data set, a small model and the loops around them, by public names only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Noise(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Float64 images with labels, augmented by noise drawn from torch's generator."""

    def __init__(self, size: int, *, augment: bool = False) -> None:
        generator = torch.Generator().manual_seed(size)
        self.images = torch.randn(size, 1, 6, 6, generator=generator, dtype=torch.float64)
        self.augment = augment

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = self.images[index]
        if self.augment:
            image = image + 0.1 * torch.randn(image.shape, dtype=image.dtype)
        return image, index % 3


def small_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    ).double()


def train_epoch(
    trial: Any,
    model: Any,
    optimizer: Any,
    losses: list[float],
    *,
    batch_size: int,
    movable: bool = False,
    after_step: Callable[[int], Any] = lambda step: None,
) -> None:
    """One epoch, whose losses are added to `losses`."""
    model.train()
    batches = trial.batches("train", batch_size=batch_size, movable=movable)
    for step, (images, labels) in enumerate(batches):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(trial.mean(loss.item(), weight=trial.shard_size))
        after_step(step)


def evaluate(trial: Any, model: Any, measure: Callable[[Any, Any], Any]) -> float:
    """The sum of `measure`, of outputs and labels, over the validation data."""
    model.eval()
    with torch.no_grad():
        batches = trial.batches("val", batch_size=8)
        total = sum(float(measure(model(images), labels)) for images, labels in batches)
    return float(trial.sum(total))


def num_wrong(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(1) != labels).sum()


def train(trial: Any, *, epochs: int = 6, batch_size: int = 10) -> float:
    """Train with BatchNorm and momentum; the losses of all steps go into a user attribute."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    model, optimizer, scheduler = trial.prepare(model, optimizer, scheduler)
    losses = trial.state.setdefault("losses", [])
    for epoch in trial.epochs(epochs):
        train_epoch(trial, model, optimizer, losses, batch_size=batch_size)
        scheduler.step()
        torch.rand(())  # moves the generator on, alike on every rank
        trial.report(evaluate(trial, model, num_wrong) / 20, epoch)
        if trial.should_prune():
            raise AssertionError("nothing prunes here")
    trial.set_user_attr("losses", losses)
    trial.set_user_attr("noise", torch.rand(3).tolist())
    return losses[-1]
