"""A trial that can't be checkpointed can't be moved; the others go on as if nobody had asked."""

from __future__ import annotations

import functools
import io
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch

from optuna_fleet import Checkpoints, FleetExecutor
from optuna_fleet.alloc.problem import AllocationProblem, Plan
from optuna_fleet.events import MoveRefused
from optuna_fleet.policies import Own
from optuna_fleet.sampler_bridge.records import flights_of
from tests.fleets import Leg, run, small_model, small_pipeline, train_epoch
from tests.placed_plans import placed_plan


@dataclass(frozen=True)
class Restless:
    """Gives each trial that can move now another device than its own, if there is one."""

    name: str = "restless"

    def allocate(self, problem: AllocationProblem) -> Plan:
        placed = {number: problem.by_number[number].devices for number in problem.pinned}
        free = set(problem.devices).difference(*placed.values())
        for number, candidate in problem.by_number.items():
            others = free.difference(candidate.devices)
            if number not in placed and free:
                placed[number] = (min(others or free),)
                free.difference_update(placed[number])
        return placed_plan(problem, placed, [[number] for number in placed])


OPTIONS: dict[str, Any] = {
    "devices": 3,
    "device_type": "cpu",
    "policy": Own(allocator=Restless(), paradigm="elastic", time_limit_s=600.0),
}


class Stubborn:
    """Has a state that nobody can save; leaves a note where somebody has tried."""

    def __init__(self, note: Path) -> None:
        self.note = note

    def state_dict(self) -> dict[str, Any]:
        self.note.touch()
        raise RuntimeError("my state is mine")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("nobody can have saved it")


def test_nobody_waits_for_a_trial_that_can_not_be_moved(tmp_path: Path, log: io.StringIO) -> None:
    asked, done = tmp_path / "asked", tmp_path / "done"

    def objective(trial: Any) -> float:
        """Trial 1 trains five epochs after trial 0 was to move, trial 0 until trial 1 is done."""
        model = small_model()
        model, optimizer = trial.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
        if trial.number == 0:
            trial.prepare(Stubborn(asked))
        for epoch in trial.epochs(10**6):
            train_epoch(trial, model, optimizer, [], batch_size=10)
            if trial.number == 0 and done.exists():
                return float(epoch)
            if trial.number == 1 and asked.exists():
                trial.state["epochs"] = trial.state.get("epochs", 0) + 1
                if trial.state["epochs"] == 5:
                    done.touch()
                    return float(epoch)
        raise AssertionError("there is no end to it but these")

    study = optuna.create_study()
    with FleetExecutor(small_pipeline(), preflight=False, **OPTIONS) as fleet:
        study.optimize(objective, n_trials=2, executor=fleet)
    assert len(flights_of(study)[0]) == 1
    assert log.getvalue().count("can't change its devices") == 1


def counts_samples(trial: Any, *, flag: Path) -> float:
    """Has what it learns in a variable of its own; its process is killed once."""
    seen = 0
    for epoch in trial.epochs(6):
        for _, labels in trial.batches("train", batch_size=10):
            seen += len(labels)
        if epoch == 3 and trial.number == 0 and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return float(seen)


def test_what_is_trained_without_prepare_is_never_moved(tmp_path: Path, log: io.StringIO) -> None:
    study = optuna.create_study()
    due = Checkpoints(tmp_path / "checkpoints", interval_s=0)
    with FleetExecutor(small_pipeline(), checkpoints=due, **OPTIONS) as fleet:
        objective = functools.partial(counts_samples, flag=tmp_path / "killed")
        study.optimize(objective, n_trials=2, executor=fleet)
    assert [trial.value for trial in study.trials] == [246.0, 246.0]
    assert [len(flights_of(study)[number]) for number in (0, 1)] == [2, 1]
    assert log.getvalue().count("without trial.prepare(model, optimizer) it stays") == 1


def test_a_model_that_was_changed_in_the_loop_is_not_moved(fleet: Any, log: io.StringIO) -> None:
    def objective(trial: Any) -> float:
        model = small_model()
        trial.prepare(model, optimizer := torch.optim.SGD(model.parameters(), lr=0.05))
        for epoch in trial.epochs(3):
            if epoch == 1:
                torch.nn.utils.parametrizations.weight_norm(model[-1])
            train_epoch(trial, model, optimizer, [], batch_size=10)
        return 0.0

    run(fleet, objective, Leg((0,), 2), Leg((1,)))
    assert any(isinstance(event, MoveRefused) for event in fleet.events)
    assert "since the loop over epochs began (4.parametrizations.weight" in log.getvalue()


def has_no_space(trial: Any) -> float:
    """What it trains is as large as ever, but nothing can be written."""

    def write(*_: Any) -> str:
        raise OSError("no space left")

    model = small_model()
    trial.prepare(model, optimizer := torch.optim.SGD(model.parameters(), lr=0.05))
    trial._training.saver._files.write = write
    steps = trial.state.setdefault("steps", [])
    for _ in trial.epochs(2):
        train_epoch(trial, model, optimizer, [], batch_size=10)
        steps.append(trial.world_size)
    trial.set_user_attr("steps", steps)
    return 0.0


@pytest.mark.parametrize(("following", "widths"), [((1, 0), [1, 2]), ((1,), [1, 1])])
def test_where_nothing_can_be_written_it_moves_with_what_is_in_memory(
    fleet: Any, log: io.StringIO, following: tuple[int, ...], widths: list[int]
) -> None:
    trial = run(fleet, has_no_space, Leg((0,), 1), Leg(following))
    assert trial.user_attrs["steps"] == widths
    assert any(isinstance(event, MoveRefused) for event in fleet.events) == (widths == [1, 1])
    assert log.getvalue().count("goes on without a new checkpoint. no space left") == 1
