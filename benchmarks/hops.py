"""What one widening within an epoch takes: calls of this package's functions, on rank 0.

python benchmarks/hops.py
python benchmarks/hops.py --most 20      # and which are called most

A trial of a small perceptron goes from one device to two, and its first rank stays. Calls are
counted in its trainer, by the thread that trains, from where it has come to the stop line to where
the objective gets the next batch. *leaving*: until the objective is left; *between*: until it
begins anew; *restoring*: then, to put back what was captured; *objective*: what it asks for
itself until it has a batch, as in any beginning. Comprehensions and generator expressions are not
counted: newer Pythons have no calls for most of them.
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
PHASES = ("leaving", "between", "restoring", "objective")
STARTS = {
    "trainer/moves/leaving.py: Leaving.leave": "leaving",
    "trainer/session.py: Session.leave": "between",
}
RESTORING = (
    "TrainingState.go_on_with",
    "TrainingState._restore",
    "TrainingState.begin_loop",
    "TrainingState.first_step",
)


class Watch:
    """Counts this thread's calls from the stop line on, by phase of the move."""

    def __init__(self) -> None:
        self.phases = {name: Counter[str]() for name in PHASES}
        self._at = ""

    def begin_objective(self) -> None:
        """It begins anew."""
        self._at = "objective"

    def called(self, frame: Any, event: str, _: Any) -> None:
        """As `sys.setprofile` has it."""
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE) or code.co_name[0] == "<":
            return
        name = f"{code.co_filename.removeprefix(PACKAGE)}: {code.co_qualname}"
        if name in STARTS:
            self._at = STARTS[name]
        if self._at:
            is_restoring = self._at == "objective" and restores(frame)
            self.phases["restoring" if is_restoring else self._at][name] += 1


def restores(frame: Any) -> bool:
    """Whether the objective would not have come here in a trial that begins."""
    while frame.f_code is not trains.__code__:
        if frame.f_code.co_qualname in RESTORING:
            return True
        frame = frame.f_back
    return False


def watch() -> Watch:
    """Of this process; no variable of the objective's, at which a move would look."""
    made: Watch = sys.__dict__.setdefault("watch", Watch())
    return made


def trains(trial: Any) -> float:
    if trial.world_size == 2:
        watch().begin_objective()
    model = torch.nn.Sequential(torch.nn.Linear(36, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.double().parameters(), lr=0.01, momentum=0.9)
    model, optimizer = trial.prepare(model, optimizer)
    for _ in trial.epochs(1):
        for images, labels in trial.batches("train", batch_size=16, movable=True):
            if trial.world_size == 2:
                sys.setprofile(None)
            loss = torch.nn.functional.cross_entropy(model(images.flatten(1)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trial.totals["loss"] += loss.detach() * trial.shard_size
            step = trial.state["step"] = trial.state.get("step", 0) + 1
            if trial.world_size == 1 and step == STEPS_BEFORE:
                ask_to_move(trial)
                sys.setprofile(watch().called)
    trial.set_user_attr("phases", watch().phases)
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
    phases = study.trials[0].user_attrs["phases"]
    for name, calls in phases.items():
        modules = {function.partition(":")[0] for function in calls}
        print(
            f"{name}: {sum(calls.values())} calls, {len(calls)} functions, {len(modules)} modules"
        )
        for function, number in sorted(calls.items(), key=lambda item: -item[1])[: given.most]:
            print(f"  {number:4} {function}")
    numbers = [sum(calls.values()) for calls in phases.values()]
    print(f"calls in all: {sum(numbers)}; without the objective's own: {sum(numbers[:-1])}")


if __name__ == "__main__":
    main()
