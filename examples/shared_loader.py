"""One data loader for several training processes that were started by hand, without Optuna.

python examples/shared_loader.py  # four models at once, some seconds
python examples/shared_loader.py --learning-rates 0.3 0.1 0.03 --epochs 20
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from digits import load_datasets
from torch import nn

from optuna_fleet import SharedPipeline


def train(rank: int, handle: Any, learning_rates: list[float], num_epochs: int) -> None:
    """Train one model; the others read the same data, at batch sizes and speeds of their own."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    learning_rate, batch_size = learning_rates[rank], (16, 24, 32, 50)[rank % 4]
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(16 * 8 * 8, 64), nn.ReLU(), nn.Linear(64, 10)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
    with handle.connect() as reader:
        for epoch in range(num_epochs):
            more = epoch + 1 < num_epochs
            for images, labels in reader.batches(
                "train", batch_size=batch_size, epoch=epoch, continues=more
            ):
                loss = F.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        with torch.no_grad():
            correct = sum(
                int((model(images).argmax(1) == labels).sum())
                for images, labels in reader.batches("val", batch_size=120, epoch=0)
            )
    print(f"learning rate {learning_rate:g}, batch size {batch_size}: {correct} of 360 are right")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[0.1, 0.05, 0.02, 0.01])
    parser.add_argument("--epochs", type=int, default=6)
    arguments = parser.parse_args()

    training, held_out = load_datasets()
    with SharedPipeline(train=training, val=held_out) as pipeline:
        torch.multiprocessing.spawn(
            train,
            args=(pipeline.handle(), arguments.learning_rates, arguments.epochs),
            nprocs=len(arguments.learning_rates),
        )
        stats = pipeline.stats()
    print(
        f"{stats.preprocessed} samples were preprocessed and used {stats.consumed} times: "
        f"{stats.sharing_factor:.1f} times each."
    )


if __name__ == "__main__":
    main()
