"""What else there is to moves within an epoch than their results, which are in `behaviour`."""

from __future__ import annotations

import functools
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import optuna
import pytest
import torch
import torch.nn.functional as F

from optuna_fleet import Checkpoints, SharedPipeline
from optuna_fleet.sampler_bridge.records import flights_of
from optuna_fleet.trainer.data import telling
from optuna_fleet.trainer.saving import Saver
from tests.fleets import Leg, Noise, ask_to_move, fleet_of, small_model
from tests.waiting import until

SIZE, BATCH = 41, 4
STEPS = -(-SIZE // BATCH)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Any]:
    pipeline = SharedPipeline(train=Noise(SIZE))
    never = Checkpoints(interval_s=1e6)  # who is asked to stop is to move
    with fleet_of(devices=4, pipeline=pipeline, checkpoints=never) as executor:
        yield executor


def prepared(trial: Any) -> Any:
    model = small_model()
    return trial.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))


def all_are_asked(trial: Any) -> bool:
    is_asked = trial._session.stop_line._is_asked
    return bool(trial.sum(int(is_asked)) == trial.world_size)


def goes_on_before_it_is_written(trial: Any, *, folder: Path, within: bool) -> float:
    """The first run's checkpoint is not written before the second one trains."""
    model, optimizer = prepared(trial)
    write, goes_on = Saver._write, folder / "goes on"

    def writes_later(*args: Any) -> None:
        until(goes_on.exists)
        write(*args)

    num_steps = trial.state.get("steps", 0)
    with mock.patch.object(Saver, "_write", writes_later):
        for _ in trial.epochs(2):
            for images, labels in trial.batches("train", batch_size=BATCH, movable=within):
                F.cross_entropy(model(images), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
                if trial.state.setdefault("steps", 0) > num_steps > 0:
                    goes_on.touch()
                trial.state["steps"] += 1
                if trial.state["steps"] == 3:
                    ask_to_move(trial)
                    while not all_are_asked(trial):
                        trial.should_prune()
    return float(trial.state["steps"])


@pytest.mark.parametrize("within", [True, False])
def test_a_trial_that_keeps_a_device_waits_for_no_file(
    fleet: Any, tmp_path: Path, within: bool
) -> None:
    fleet.script = {0: [Leg((0, 1), until_asked=True), Leg((2, 0))]}
    objective = functools.partial(goes_on_before_it_is_written, folder=tmp_path, within=within)
    study = optuna.create_study()
    study.optimize(objective, n_trials=1, executor=fleet)
    assert [flight["ending"] for flight in flights_of(study)[0]] == ["yielded", "returned"]
    assert study.trials[0].value == 2 * STEPS


def has_long_epochs(trial: Any, *, movable: bool) -> float:
    prepared(trial)
    was, telling._LONG_S = telling._LONG_S, 0.0
    try:
        for _ in trial.epochs(3):
            for _ in trial.batches("train", batch_size=BATCH, movable=movable):
                pass
    finally:
        telling._LONG_S = was
    return 0.0


@pytest.mark.parametrize("movable", [False, True])
def test_long_epochs_are_told_of_once(fleet: Any, movable: bool, log: io.StringIO) -> None:
    fleet.script = {n: [Leg((n,))] for n in range(2)}
    objective = functools.partial(has_long_epochs, movable=movable)
    optuna.create_study().optimize(objective, n_trials=2, executor=fleet)
    assert log.getvalue().count("movable=True") == (not movable)
