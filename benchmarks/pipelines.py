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
from functools import partial
from typing import Any

import optuna
import torch
from torch import Tensor, nn

from optuna_fleet import FleetExecutor, SharedPipeline
from optuna_fleet.replay.virtual_workers import StageTimes, VirtualWorkers
from optuna_fleet.wsp.schedules import Alone, Flush, WaveSynchronous

NUM_LAYERS = 6
STEPS = {True: 12, False: 40}  # with flushes, without
PACES = {"2 alike": (1.0, 1.0), "3 alike": (1.0, 1.0, 1.0), "fast, slow": (1.0, 2.0)}


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


def objective(
    trial: Any, paces: tuple[float, ...], layer_s: float, in_flight: int, flush: bool
) -> float:
    """Notes steps per second in the steady state."""
    torch.set_num_threads(1)
    # The first batch is asked for on one device, whose pace is that of the first.
    layers = [Sleeps(layer_s * paces[trial.rank]) for _ in range(NUM_LAYERS)]
    model = nn.Sequential(*layers)
    pipeline = trial.pipeline(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-3),
        nn.functional.mse_loss,
        in_flight=in_flight,
        flush=flush,
        min_devices=len(paces),
        max_devices=len(paces),
    )
    began_s = seconds = 0.0
    trial.set_user_attr("layer_s", slept_s(layer_s))
    for _ in trial.epochs(1):
        for step, (x, y) in enumerate(trial.batches("train", batch_size=8)):
            if step == STEPS[flush] // 2:
                began_s = time.perf_counter()
            if step == STEPS[flush]:
                seconds = time.perf_counter() - began_s
                break
            pipeline.step(x, y)
    trial.set_user_attr("cuts", list(pipeline.cuts))
    trial.set_user_attr(
        "steps_per_s", (STEPS[flush] - STEPS[flush] // 2) / seconds
    )  # the first rank's counts
    return 0.0


def slept_s(layer_s: float) -> float:
    """How long a forward pass of a layer takes here by itself: it oversleeps."""
    model = nn.Sequential(*[Sleeps(layer_s) for _ in range(NUM_LAYERS)])
    began_s = time.perf_counter()
    model(torch.zeros(8, 4)).sum().backward()
    return (time.perf_counter() - began_s) / 3 / NUM_LAYERS


def simulated(
    paces: tuple[float, ...], layer_s: float, cuts: list[int], in_flight: int, flush: bool
) -> float:
    """The same by the simulator, which knows nothing of messages and Python."""
    bounds = [0, *cuts, NUM_LAYERS]
    sizes = [end - first for first, end in itertools.pairwise(bounds)]
    if len(set(paces)) > 1:  # the partitioner has the larger stage on the faster device
        sizes, paces = sorted(sizes, reverse=True), tuple(sorted(paces))
    times = [
        StageTimes(forward_s=n * layer_s * pace, backward_s=2 * n * layer_s * pace)
        for n, pace in zip(sizes, paces, strict=True)
    ]
    schedule = (Flush if flush else WaveSynchronous)(in_flight)
    outcome = VirtualWorkers([times], Alone(schedule)).run(200)
    return outcome.minibatches_per_s / (in_flight if flush else 1)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layer-ms", type=float, default=20.0, help="of a forward pass")
    layer_s = parser.parse_args().layer_ms / 1e3
    data = torch.utils.data.TensorDataset(*2 * [torch.zeros(8 * (max(STEPS.values()) + 1), 4)])
    print("| devices | flush | in flight | cuts | steps/s | simulated | ratio | load |")
    print("|-|-|-|-|-|-|-|-|")
    for name, paces in PACES.items():
        with FleetExecutor(SharedPipeline(train=data), devices=len(paces)) as fleet:
            for flush, in_flight in itertools.product((True, False), (1, 2, 3, 4)):
                run = partial(
                    objective, paces=paces, layer_s=layer_s, in_flight=in_flight, flush=flush
                )
                study = optuna.create_study()
                study.optimize(run, n_trials=1, executor=fleet)
                trial = study.trials[0]
                cuts, rate = trial.user_attrs["cuts"], trial.user_attrs["steps_per_s"]
                expected = simulated(paces, trial.user_attrs["layer_s"], cuts, in_flight, flush)
                ratio, load = rate / expected, os.getloadavg()[0]
                print(
                    f"| {name} | {flush} | {in_flight} | {cuts} | {rate:.2f} "
                    f"| {expected:.2f} | {ratio:.3f} | {load:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    main()
