"""What stale weights do to accuracy: digits on two virtual workers, by the engine in one process.

python benchmarks/staleness.py --seeds 0 1 2 3 4
python benchmarks/staleness.py --processes --seeds 0 1 2 3 4

Two virtual workers of two stages, the second half as fast (by the engine's own clock), 4
minibatches of 16 in flight, 2,500 minibatches each; D = 0 and D = 4 beside synchronous SGD, which
takes the sum of both virtual workers' gradients at each step. All have the same minibatches and
learning rate. With --processes the same by `trial.pipeline` on 4 devices, 57 epochs of batches of
32, as fast as this machine is; beside it the exact pipelines that step together. The learning rate
falls to a tenth after 40 epochs there, but for --constant-rate.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from functools import partial
from typing import Any

import optuna
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from optuna_fleet import FleetExecutor, SharedPipeline
from optuna_fleet.trainer.pipeline_parallel.blueprint import Blueprint
from optuna_fleet.trainer.pipeline_parallel.in_process import InProcess, Workers
from optuna_fleet.trainer.pipeline_parallel.messages import StageAddress
from optuna_fleet.wsp.schedules import Flush, WaveSynchronous
from optuna_fleet.wsp.turns import Turn

BATCH_SIZE, NUM_MINIBATCHES, IN_FLIGHT, LR = 16, 2500, 4, 0.02
SCHEDULES: dict[str, WaveSynchronous | Flush] = {
    "synchronous SGD": Flush(1),
    "D = 0": WaveSynchronous(IN_FLIGHT, 0),
    "D = 4": WaveSynchronous(IN_FLIGHT, 4),
}
DISTANCES = {"with flushes": None, "D = 0": 0, "D = 4": 4}


def model() -> nn.Sequential:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Flatten(), nn.Linear(128, 64), nn.ReLU()),
        nn.Linear(64, 10),
    )


def accuracy(schedule: WaveSynchronous | Flush, seed: int) -> float:
    """Of the test set, a fifth of the digits."""
    images, labels = digits(seed)
    (x, test_x), (y, test_y) = (t.split([1400, len(t) - 1400]) for t in (images, labels))

    def batch(worker: int, number: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed * 10**6 + 2 * number + worker)
        chosen = torch.randint(len(x), (BATCH_SIZE,), generator=generator)
        return x[chosen], y[chosen]

    torch.manual_seed(seed)
    blueprint = Blueprint(
        model=model(),
        cuts=((2,), (2,)),
        schedule=schedule,
        loss=functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=LR),
    )
    transport = InProcess(unlike_paces)
    workers = Workers.of(blueprint, transport)
    workers.give(batch, NUM_MINIBATCHES)
    transport.run()
    with torch.no_grad():
        output = functional_call(blueprint.model, workers.weights(), (test_x,))
    return (output.argmax(1) == test_y).float().mean().item()


def unlike_paces(address: StageAddress, turn: Turn) -> float:
    return 1.0 + address.worker


def digits(seed: int) -> tuple[Tensor, Tensor]:
    bunch = load_digits()
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(seed))
    images = torch.from_numpy(bunch.images).float()[:, None] / 16
    return images[order], torch.from_numpy(bunch.target)[order]


def objective(trial: Any, seed: int, distance: int | None, constant_rate: bool) -> float:
    """Accuracy of two virtual workers in processes; batches and rate as of both together."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=2 * LR)
    options = {"virtual_workers": 2, "clock_distance": distance, "in_flight": IN_FLIGHT}
    pipeline = trial.pipeline(net, optimizer, functional.cross_entropy, min_devices=4, **options)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 40, 1.0 if constant_rate else 0.1)
    schedule = trial.prepare(schedule)
    for _ in trial.epochs(57):
        for x, y in trial.batches("train", batch_size=2 * BATCH_SIZE, drop_last=True):
            pipeline.step(x, y)
        schedule.step()
    assert (pipeline.num_virtual_workers, pipeline.num_stages) == (2, 2)
    found: float = pipeline.evaluate(trial.batches("test", batch_size=100), share_right)
    return found


def share_right(output: Tensor, labels: Tensor) -> Tensor:
    return (output.argmax(1) == labels).float().mean()


def in_processes(seed: int, *, constant_rate: bool) -> list[float]:
    """Of each of `DISTANCES`."""
    images, labels = digits(seed)
    parts = [
        torch.utils.data.TensorDataset(x, y)
        for x, y in zip(images.split([1400, 397]), labels.split([1400, 397]), strict=True)
    ]
    found = []
    with FleetExecutor(SharedPipeline(train=parts[0], test=parts[1]), devices=4) as fleet:
        for distance in DISTANCES.values():
            study = optuna.create_study(direction="maximize")
            trains = partial(objective, seed=seed, distance=distance, constant_rate=constant_rate)
            study.optimize(trains, n_trials=1, executor=fleet)
            found.append(study.best_value)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--processes", action="store_true", help="by trial.pipeline")
    parser.add_argument("--constant-rate", action="store_true", help="with --processes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    columns = []
    for seed in arguments.seeds:
        if arguments.processes:
            columns.append(in_processes(seed, constant_rate=arguments.constant_rate))
        else:
            columns.append([accuracy(schedule, seed) for schedule in SCHEDULES.values()])
        print(f"seed {seed}: {columns[-1]}", file=sys.stderr, flush=True)
    print("| test accuracy | mean | " + " | ".join(f"seed {s}" for s in arguments.seeds) + " |")
    print("|-|-|" + "-|" * len(columns))
    names = DISTANCES if arguments.processes else SCHEDULES
    for name, found in zip(names, zip(*columns, strict=True), strict=True):
        cells = (f"{100 * share:.1f} %" for share in (statistics.mean(found), *found))
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
