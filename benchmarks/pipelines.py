"""`trial.pipeline` on emulated devices, beside the simulator and the partitioner.

python benchmarks/pipelines.py            # about four minutes; idle cores, or messages are slow

Real processes and messages; only the layers are emulated: their passes sleep. Devices may be
unlike: then the same layers sleep longer on some of them. Taken is the time of the second half of
the steps, as the first rank sees it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import optuna
import torch
from papers.simulator import StageTimes, VirtualWorkers
from torch import Tensor, nn

from optuna_fleet import FleetExecutor, SharedPipeline
from optuna_fleet.virtual_workers.wsp import Flush, WaveSynchronous

NUM_LAYERS = 6
STEPS = {True: 12, False: 40}  # with flushes, without
PACES = {"2 alike": (1.0, 1.0), "3 alike": (1.0, 1.0, 1.0), "fast, slow": (1.0, 2.0)}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row: devices, and how they train."""

    paces: tuple[float, ...]
    in_flight: int
    flush: bool


class _Asleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradients[0], None, None


class Sleeps(nn.Module):
    """A layer whose backward pass takes twice as long as its forward pass."""

    def __init__(self, forward_s: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.forward_s = forward_s

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        slept: Tensor = _Asleep.apply(x * self.scale, self.forward_s, 2 * self.forward_s)  # type: ignore[no-untyped-call]
        return slept


def objective(trial: Any, case: Case, layer_s: float) -> float:
    """Notes steps per second in the steady state."""
    torch.set_num_threads(1)
    # The first batch is asked for on one device, whose pace is that of the first.
    layers = [Sleeps(layer_s * case.paces[trial.rank]) for _ in range(NUM_LAYERS)]
    model = nn.Sequential(*layers)
    pipeline = trial.pipeline(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-3),
        nn.functional.mse_loss,
        in_flight=case.in_flight,
        virtual_workers=1,
        **({} if case.flush else {"clock_distance": 0}),
        min_devices=len(case.paces),
        max_devices=len(case.paces),
    )
    trial.set_user_attr("layer_s", slept_s(layer_s))
    trial.set_user_attr("steps_per_s", rate(trial, pipeline.step, STEPS[case.flush]))
    trial.set_user_attr("cuts", list(pipeline.cuts))
    return 0.0


def rate(trial: Any, step: Callable[[Tensor, Tensor], object], num_steps: int) -> float:
    """Steps per second, over the second half of them."""
    began_s = seconds = 0.0
    for _ in trial.epochs(1):
        for number, (x, y) in enumerate(trial.batches("train", batch_size=8)):
            if number == num_steps // 2:
                began_s = time.perf_counter()
            if number == num_steps:
                seconds = time.perf_counter() - began_s
                break
            step(x, y)
    return (num_steps - num_steps // 2) / seconds


def slept_s(layer_s: float) -> float:
    """How long a forward pass of a layer takes here by itself: it oversleeps."""
    model = nn.Sequential(*[Sleeps(layer_s) for _ in range(NUM_LAYERS)])
    began_s = time.perf_counter()
    model(torch.zeros(8, 4)).sum().backward()
    return (time.perf_counter() - began_s) / 3 / NUM_LAYERS


def simulated(case: Case, layer_s: float, cuts: list[int]) -> float:
    """Steps per second by the simulator, which knows nothing of messages and Python."""
    bounds = [0, *cuts, NUM_LAYERS]
    sizes = [end - first for first, end in itertools.pairwise(bounds)]
    paces = sorted(case.paces)
    if len(set(paces)) > 1:  # the partitioner has the larger stage on the faster device
        sizes.sort(reverse=True)
    times = [
        StageTimes(forward_s=n * layer_s * pace, backward_s=2 * n * layer_s * pace)
        for n, pace in zip(sizes, paces, strict=True)
    ]
    alone = WaveSynchronous(case.in_flight, None)
    outcome = VirtualWorkers([times], Flush(case.in_flight) if case.flush else alone).run(200)
    return outcome.minibatches_per_s / (case.in_flight if case.flush else 1)


def print_row(fleet: FleetExecutor, name: str, case: Case, layer_s: float) -> None:
    """Have one trial of it, and print what it notes."""
    study = optuna.create_study()
    study.optimize(partial(objective, case=case, layer_s=layer_s), n_trials=1, executor=fleet)
    found = study.trials[0].user_attrs
    expected = simulated(case, found["layer_s"], found["cuts"])
    print(
        f"| {name} | {case.flush} | {case.in_flight} | {found['cuts']} "
        f"| {found['steps_per_s']:.2f} | {expected:.2f} "
        f"| {found['steps_per_s'] / expected:.3f} | {os.getloadavg()[0]:.1f} |",
        flush=True,
    )


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layer-ms", type=float, default=20.0, help="of a forward pass")
    arguments = parser.parse_args()
    layer_s = arguments.layer_ms / 1e3
    data = torch.utils.data.TensorDataset(*2 * [torch.zeros(8 * (max(STEPS.values()) + 1), 4)])
    print("| devices | flush | in flight | cuts | steps/s | simulated | ratio | load |")
    print("|-|-|-|-|-|-|-|-|")
    for name, paces in PACES.items():
        with FleetExecutor(SharedPipeline(train=data), devices=len(paces)) as fleet:
            for flush, in_flight in itertools.product((True, False), (1, 2, 3, 4)):
                case = Case(paces=paces, in_flight=in_flight, flush=flush)
                print_row(fleet, name, case, layer_s)


if __name__ == "__main__":
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    main()
