"""A sweep as a script: its driver, on a node where others may join."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna

from optuna_fleet import JoinCluster, SharedPipeline
from tests.executor.test_nodes import AtReport, runtime_of
from tests.fleets import Noise, fleet_of, train


class Confidential(Noise):
    """As `Noise`, but for a word that nobody else is to read."""

    words = "confidential data"


def objective(trial: Any) -> float:
    """Of which nobody else is to read a word."""
    trial.suggest_float("confidential parameter", 0, 1)
    trial.set_user_attr("words", "confidential objective")
    return train(trial)


WORDS = (b"confidential data", b"confidential parameter", b"confidential objective")


def fleet_on(**options: Any) -> Any:
    """A fleet with the data of all these sweeps."""
    pipeline = SharedPipeline(train=Confidential(41, augment=True), val=Noise(20))
    return fleet_of(pipeline=pipeline, **options)


def losses(
    fleet: Any, num_trials: int, act: Callable[[int, int], None] = lambda number, epoch: None
) -> list[Any]:
    """All losses of some trials."""
    study = optuna.create_study(pruner=AtReport(act))
    study.optimize(objective, n_trials=num_trials, executor=fleet)
    return [trial.user_attrs["losses"] for trial in study.trials]


def main() -> None:
    """Print "here" at the first report of an epoch, and go on when told to; print the losses.

    Then there is another one, of nodes that join by the loopback interface.
    """
    is_told = False

    def ask(number: int, epoch: int) -> None:
        nonlocal is_told
        if epoch == 2 and not is_told:
            is_told = True
            print("here", flush=True)
            sys.stdin.readline()

    elsewhere, here = map(Path, sys.argv[1:])
    with fleet_on(devices=None, cluster=JoinCluster(file=elsewhere)) as fleet:
        idle = optuna.create_study()
        while not fleet._runner._runtime or len(runtime_of(fleet).trainers.have_served) < 5:
            idle.optimize(lambda trial: 0.0, n_trials=5, executor=fleet)
        print(json.dumps(losses(fleet, 5, ask)), flush=True)
    with fleet_on(devices=None, cluster=JoinCluster(file=here, host="127.0.0.1")) as fleet:
        losses(fleet, 1)


if __name__ == "__main__":
    main()
