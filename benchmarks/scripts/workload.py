"""Objectives of the overhead benchmarks, on the data of `examples/digits.py`."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

BATCH_SIZE = 32


def build_model(width: int = 32) -> nn.Module:
    """Three convolutions: training is a little slower than augmenting the data on one core."""
    layers: list[nn.Module] = []
    channels = 1
    for _ in range(3):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, 10))


def prepared(trial: Any, width: int = 32) -> Any:
    model = build_model(width)
    return trial.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))


def train_epoch(
    trial: Any, model: nn.Module, optimizer: Any, data: str = "train"
) -> Iterator[float]:
    """Train for one epoch and yield the loss of each step."""
    model.train()
    for images, labels in trial.batches(data, batch_size=BATCH_SIZE):
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def train(
    trial: Any, *, num_epochs: int, stop_after_s: float = math.inf, data: str = "train"
) -> float:
    """Train on one thread for that many epochs, or that long."""
    model, optimizer = prepared(trial)
    torch.set_num_threads(1)  # after `prepare`, which sets the slot's share of the cores
    deadline = time.monotonic() + stop_after_s
    losses: list[float] = []
    for epoch in trial.epochs(num_epochs):
        losses = list(train_epoch(trial, model, optimizer, data))
        trial.report(sum(losses) / len(losses), epoch)
        if trial.should_prune() or time.monotonic() >= deadline:
            break
    return losses[-1]


def train_timed(trial: Any, *, long_epochs: int, short_epochs: int, num_long: int) -> float:
    """Train, and note when each flight had its first and its last step."""
    spans: list[list[float]] = trial.state.setdefault("spans", [])
    is_long = trial.number < num_long
    model, optimizer = prepared(trial, width=16)
    flight: list[float] | None = None
    for _ in trial.epochs(long_epochs if is_long else short_epochs):
        for _ in train_epoch(trial, model, optimizer):
            now = time.time()
            if flight is None:
                spans.append(flight := [now, now])
            flight[1] = now
    trial.set_user_attr("spans", spans)
    return 0.0


def first_step(trial: Any) -> float:
    """Train one epoch and note when the first step was done."""
    model, optimizer = prepared(trial)
    for _ in trial.epochs(1):
        steps = train_epoch(trial, model, optimizer)
        next(steps)
        trial.set_user_attr("first_step", time.time())
        for _ in steps:
            pass
    return 0.0
