"""What one widening within an epoch takes: calls of this package's functions, on rank 0.

python benchmarks/hops.py
python benchmarks/hops.py --most 20      # the functions that are called most

A trial of a small perceptron goes from one device to two, and its first rank stays. Calls are
counted in its trainer, by the thread that trains, from where it has come to the stop line to where
the objective gets the next batch. *Leaving*: until the objective is left. *Between*: until it
begins anew. *Beginning*: until its loop gets a batch, with all that it asks for itself before.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import optuna
import torch

import optuna_fleet
from optuna_fleet import SharedPipeline
from tests.fleets import Leg, Noise, ask_to_move, fleet_of

PACKAGE = str(Path(optuna_fleet.__file__).parent) + "/"
STEPS_BEFORE = 5


def watch(phases: list[Counter[str]]) -> None:
    """Count this thread's calls into the last of the phases, once there is one."""

    def called(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        if code.co_name == "leave" and code.co_filename.endswith("leaving.py"):
            phases.append(Counter())
        if phases:
            phases[-1][f"{code.co_filename.removeprefix(PACKAGE)}: {code.co_qualname}"] += 1

    sys.setprofile(called)


def trains(trial: Any) -> float:
    phases: list[Counter[str]] = sys.__dict__.setdefault("phases", [])  # of this process
    if phases:
        phases.append(Counter())
    model = torch.nn.Sequential(torch.nn.Linear(36, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.double().parameters(), lr=0.01, momentum=0.9)
    model, optimizer = trial.prepare(model, optimizer)
    for _ in trial.epochs(1):
        for step, (images, labels) in enumerate(
            trial.batches("train", batch_size=16, movable=True)
        ):
            if trial.world_size == 2:
                sys.setprofile(None)
            loss = torch.nn.functional.cross_entropy(model(images.flatten(1)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trial.totals["loss"] += loss.detach() * trial.shard_size
            if trial.world_size == 1 and step == STEPS_BEFORE:
                ask_to_move(trial)
                watch(phases)
    trial.set_user_attr("phases", phases)
    return 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--most", type=int, default=0, help="how many functions to list, by phase")
    given = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with fleet_of(devices=2, pipeline=SharedPipeline(train=Noise(800))) as fleet:
        fleet.script = {0: [Leg((0,), until_asked=True), Leg((0, 1))]}
        study = optuna.create_study()
        study.optimize(trains, n_trials=1, executor=fleet)
    phases = dict(zip(("leaving", "beginning"), study.trials[0].user_attrs["phases"], strict=True))
    for name, calls in phases.items():
        modules = {function.partition(":")[0] for function in calls}
        print(
            f"{name}: {sum(calls.values())} calls, {len(calls)} functions, {len(modules)} modules"
        )
        for function, times in sorted(calls.items(), key=lambda item: -item[1])[: given.most]:
            print(f"  {times:4} {function}")
    print(f"calls in all: {sum(sum(calls.values()) for calls in phases.values())}")


if __name__ == "__main__":
    main()
