"""From the host to the device: a plain copy, a DataLoader with pinned memory, `trial.batches`."""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any

import optuna
import torch
from gpu_data import Pictures, loader, to_device, wait_for

from optuna_fleet import FleetExecutor, SharedPipeline, take_apart


def read_through(trial: Any, num_epochs: int, batch_size: int) -> float:
    """Seconds of all epochs but the first; nothing is trained."""
    module = trial.prepare(torch.nn.Identity())
    began = 0.0
    for epoch in trial.epochs(num_epochs):
        for images, _ in trial.batches("train", batch_size=batch_size):
            images.mul_(1.0)
            device = images.device.type
        module(images)
        wait_for(device)
        began = time.perf_counter() if epoch == 0 else began
    return time.perf_counter() - began


def main() -> None:
    device = sys.argv[1]
    is_small = device == "cpu"
    size_px, num, batch_size = (32, 128, 32) if is_small else (224, 4096, 128)
    num_workers, num_epochs = (1, 3) if is_small else (8, 4)
    dataset = Pictures(num, size_px)
    sample_mb = 3 * 4 * size_px**2 / 1e6
    print(
        f"Pictures of {size_px} px as float32, batches of {batch_size}, {num_workers} workers:\n"
    )
    print("| way | samples/s | MB/s |\n|---|---|---|", flush=True)

    def tell(way: str, samples: int, seconds: float) -> None:
        rate = samples / seconds
        print(f"| {way} | {rate:.0f} | {rate * sample_mb:.0f} |", flush=True)

    samples = num * (num_epochs - 1)
    if device == "cuda":
        tell("plain copy from pinned memory", *plain_copy(batch_size, size_px))
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    in_parts, augment, finish = take_apart(dataset, augment=0, finish=1)
    pipeline = SharedPipeline(
        train=in_parts, augment=augment, finish=finish, num_preprocessors=num_workers
    )
    with FleetExecutor(pipeline, devices=1, device_type=device, policy="greedy") as fleet:
        objective = partial(read_through, num_epochs=num_epochs, batch_size=batch_size)
        study = optuna.create_study()
        study.optimize(objective, n_trials=1, executor=fleet)
        study.optimize(objective, n_trials=1, executor=fleet)
    fresh, pooled = (trial.value for trial in study.trials)
    tell("`trial.batches`, preprocessed meanwhile", samples, fresh)
    tell("`trial.batches`, preprocessed for another trial before", samples, pooled)
    tell("DataLoader", samples, dataloader_s(dataset, batch_size, device, num_workers, num_epochs))


def plain_copy(batch_size: int, size_px: int) -> tuple[int, float]:
    batch = torch.zeros(batch_size, 3, size_px, size_px).pin_memory()
    there = batch.cuda()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(50):
        there.copy_(batch, non_blocking=True)
    torch.cuda.synchronize()
    return 50 * batch_size, time.perf_counter() - began


def dataloader_s(
    dataset: Any, batch_size: int, device: str, num_workers: int, num_epochs: int
) -> float:
    batches = loader(dataset, batch_size, device, num_workers)
    began = 0.0
    for epoch in range(num_epochs):
        for images, _ in to_device(batches, device):
            images.mul_(1.0)
        wait_for(device)
        began = time.perf_counter() if epoch == 0 else began
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
