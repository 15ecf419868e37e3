"""One trial through the executor against the bare loop, in alternation on the same device."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import optuna
import torch
import workload
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchvision.models import resnet18
from torchvision.transforms import v2

from optuna_fleet import FleetExecutor, SharedPipeline, take_apart


class Pictures(torch.utils.data.Dataset[tuple[Any, int]]):
    """Bytes of 3 x `size_px` x `size_px`, flipped at random and normalised."""

    def __init__(self, num: int, size_px: int) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (min(num, 256), 3, size_px, size_px)
        self.pictures = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        self.num = num
        self.transform = v2.Compose(
            [
                v2.RandomHorizontalFlip(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize([0.5] * 3, [0.25] * 3),
            ]
        )

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.transform(self.pictures[index % len(self.pictures)]), index % 10


def loader(dataset: Any, batch_size: int, device: str, num_workers: int) -> DataLoader[Any]:
    return DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=True,
        num_workers=num_workers,
        persistent_workers=True,
        pin_memory=device == "cuda",
    )


def to_device(batches: DataLoader[Any], device: str) -> Iterator[Any]:
    for images, labels in batches:
        yield images.to(device, non_blocking=True), labels.to(device, non_blocking=True)


def new_model(is_small: bool) -> Any:
    if not is_small:
        return resnet18(num_classes=10)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 1, 1), workload.build_model(8))


def train(
    epochs: Iterable[int], batches: Callable[[], Iterable[Any]], model: Any, optimizer: Any
) -> float:
    """Seconds of all epochs but the first."""
    began = 0.0
    for epoch in epochs:
        for images, labels in batches():
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if loss.device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter() if epoch == 0 else began
    return time.perf_counter() - began


def objective(trial: Any, name: str, num_epochs: int, batch_size: int, is_small: bool) -> float:
    model = new_model(is_small)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, optimizer = trial.prepare(model, optimizer)
    read = partial(trial.batches, name, batch_size=batch_size)
    return train(trial.epochs(num_epochs), read, model, optimizer)


def main() -> None:
    device = sys.argv[1]
    is_small = device == "cpu"
    num, size_px, batch_size = (128, 16, 8) if is_small else (6144, 96, 64)
    num_workers, num_epochs, rounds = (1, 2, 2) if is_small else (8, 3, 4)
    if is_small:  # as a trainer has it: threads that spin wait for others on a busy machine
        torch.set_num_threads(1)
    dataset = Pictures(num, size_px)
    samples = num * (num_epochs - 1)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # Each trial has data of its own: none of it is preprocessed when the trial begins.
    names = [f"train{number}" for number in range(rounds + 1)]
    in_parts, augment, finish = take_apart(dataset, augment=0, finish=1)
    options: Any = {"device_type": device, "devices": 1, "policy": "greedy"}

    def rate_on(fleet: FleetExecutor, name: str) -> float:
        study = optuna.create_study()
        sizes = {"num_epochs": num_epochs, "batch_size": batch_size, "is_small": is_small}
        study.optimize(partial(objective, name=name, **sizes), n_trials=1, executor=fleet)
        return samples / study.best_value

    def bare_rate() -> float:
        model = new_model(is_small).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        read = partial(to_device, batches, device)
        return samples / train(range(num_epochs), read, model, optimizer)

    print("Samples/s; the first round is there to warm up:\n")
    print(
        "| trial on the fleet | bare loop with a DataLoader | fleet / bare (time) |\n|---|---|---|"
    )
    ratios = []
    pipeline = SharedPipeline(
        num_preprocessors=num_workers,
        augment=augment,
        finish=finish,
        **dict.fromkeys(names, in_parts),
    )
    with FleetExecutor(pipeline, **options) as fleet:
        batches = loader(dataset, batch_size, device, num_workers)
        for name in names:
            own, bare = rate_on(fleet, name), bare_rate()
            ratios.append(bare / own)
            print(f"| {own:.0f} | {bare:.0f} | {ratios[-1]:.3f} |", flush=True)
    print(f"\nMedian without the first: {statistics.median(ratios[1:]):.3f}.\n", flush=True)


if __name__ == "__main__":
    main()
