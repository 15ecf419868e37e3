"""What stale weights do to accuracy: digits on two virtual workers of two stages.

python benchmarks/staleness.py --tune                 # which learning rates, in one process
python benchmarks/staleness.py --seeds 0 1 2 3 4      # with these, by `trial.pipeline`

Synchronous SGD (pipelines with flushes) beside clock distances of 0 and 4, 4 minibatches in
flight: 57 epochs of batches of 32, of which each virtual worker has half. The learning rate falls
to a tenth after 40 epochs. The test set is the same fifth of the digits for all. Each way to train
has the learning rate of `RATES` that does best on a fifth of the training set, which it is not
trained on then, by the mean of three other seeds; of equal ones the lower.

For --tune the engine has a clock of its own, by which both virtual workers are as fast, and
synchronous SGD is torch's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import optuna
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from optuna_fleet import FleetExecutor, SharedPipeline
from optuna_fleet.virtual_workers.wsp import WaveSynchronous
from tests.virtual_workers.in_process import Blueprint, InProcess, Workers

BATCH_SIZE, IN_FLIGHT, NUM_EPOCHS, FALLS_AFTER = 32, 4, 57, 40
RATES = (0.02, 0.04, 0.08, 0.16, 0.32)
TUNING_SEEDS = (100, 101, 102)
NUM_TRAINED, NUM_TUNED = 1400, 1120
DISTANCES = {"synchronous SGD": None, "D = 0": 0, "D = 4": 4}
CHOSEN = {"synchronous SGD": 0.32, "D = 0": 0.08, "D = 4": 0.08}

Digits = tuple[Tensor, Tensor]


def model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Flatten(), nn.Linear(128, 64), nn.ReLU()),
        nn.Linear(64, 10),
    )


def digits() -> Digits:
    bunch = load_digits()
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(bunch.images).float()[:, None] / 16
    return images[order], torch.from_numpy(bunch.target)[order]


def share_right(output: Tensor, labels: Tensor) -> Tensor:
    return (output.argmax(1) == labels).float().mean()


# -- which learning rates -------------------------------------------------------------------------


def tuned(distance: int | None, rate: float, seed: int) -> float:
    """Accuracy on the part of the training set that is left out."""
    images, labels = digits()
    net = model(seed)
    for epoch in range(NUM_EPOCHS):
        rate_now = rate if epoch < FALLS_AFTER else rate / 10
        batches = list(torch.randperm(NUM_TUNED).split(BATCH_SIZE))
        whole_waves = [(images[b], labels[b]) for b in batches[: len(batches) // 4 * 4]]
        if distance is None:
            synchronous_epoch(net, whole_waves, rate_now)
        else:
            stale_epoch(net, whole_waves, rate_now, distance)
    with torch.no_grad():
        found = share_right(net(images[NUM_TUNED:NUM_TRAINED]), labels[NUM_TUNED:NUM_TRAINED])
    return found.item()


def synchronous_epoch(net: nn.Sequential, batches: list[Digits], rate: float) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    for x, y in batches:
        optimizer.zero_grad()
        functional.cross_entropy(net(x), y).backward()
        optimizer.step()


def stale_epoch(net: nn.Sequential, batches: list[Digits], rate: float, distance: int) -> None:
    """Two virtual workers with half of each batch; flushed at the end."""
    half = BATCH_SIZE // 2
    blueprint = Blueprint(
        model=net,
        cuts=((2,), (2,)),
        schedule=WaveSynchronous(IN_FLIGHT, distance),
        loss=functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate / 2),
    )
    transport = InProcess()
    workers = Workers(blueprint, transport)

    def part(worker: int, number: int) -> Digits:
        x, y = batches[number - 1]
        return x[worker * half :][:half], y[worker * half :][:half]

    workers.give(part, len(batches))
    transport.run()
    net.load_state_dict(workers.weights())


def tune() -> None:
    print("| accuracy on what is left out | " + " | ".join(map(str, RATES)) + " |")
    print("|-|" + "-|" * len(RATES))
    for name, distance in DISTANCES.items():
        means = [statistics.mean(tuned(distance, r, s) for s in TUNING_SEEDS) for r in RATES]
        print(f"| {name} | " + " | ".join(map(percent, means)) + " |", flush=True)


# -- with these, in processes ---------------------------------------------------------------------


def objective(trial: Any, seed: int, distance: int | None, rate: float) -> float:
    torch.set_num_threads(1)
    net = model(seed)
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    options = {"virtual_workers": 2, "clock_distance": distance, "in_flight": IN_FLIGHT}
    pipeline = trial.pipeline(net, optimizer, functional.cross_entropy, min_devices=4, **options)
    schedule = trial.prepare(torch.optim.lr_scheduler.StepLR(optimizer, FALLS_AFTER, 0.1))
    for _ in trial.epochs(NUM_EPOCHS):
        for x, y in trial.batches("train", batch_size=BATCH_SIZE, drop_last=True):
            pipeline.step(x, y)
        schedule.step()
    assert (pipeline.num_virtual_workers, pipeline.num_stages) == (2, 2)
    found: float = pipeline.evaluate(trial.batches("test", batch_size=100), share_right)
    return found


def tested(seed: int) -> list[float]:
    """Accuracy on the test set, of each of `DISTANCES`."""
    images, labels = digits()
    train = torch.utils.data.TensorDataset(images[:NUM_TRAINED], labels[:NUM_TRAINED])
    test = torch.utils.data.TensorDataset(images[NUM_TRAINED:], labels[NUM_TRAINED:])
    found = []
    with FleetExecutor(SharedPipeline(train=train, test=test, seed=seed), devices=4) as fleet:
        for name, distance in DISTANCES.items():
            study = optuna.create_study(direction="maximize")
            trains = partial(objective, seed=seed, distance=distance, rate=CHOSEN[name])
            study.optimize(trains, n_trials=1, executor=fleet)
            found.append(study.best_value)
    return found


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--tune", action="store_true", help="which learning rates to take")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if arguments.tune:
        tune()
        return
    columns = []
    for seed in arguments.seeds:
        columns.append(tested(seed))
        print(f"seed {seed}: {columns[-1]}", file=sys.stderr, flush=True)
    print("| accuracy | rate | mean | " + " | ".join(f"seed {s}" for s in arguments.seeds) + " |")
    print("|-|-|-|" + "-|" * len(columns))
    for name, found in zip(DISTANCES, zip(*columns, strict=True), strict=True):
        cells = map(percent, (statistics.mean(found), *found))
        print(f"| {name} | {CHOSEN[name]} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
