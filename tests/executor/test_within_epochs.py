"""What else there is to moves within an epoch than their results, which are in `behaviour`."""

from __future__ import annotations

import functools
import io
import itertools
import random
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import optuna
import pytest
import torch
import torch.nn.functional as F

from optuna_fleet import Checkpoints, SharedPipeline
from optuna_fleet.sampler_bridge.records import flights_of
from optuna_fleet.trainer.checkpoints.saving import Saver
from optuna_fleet.trainer.data import shard_loader
from tests.fleets import Leg, Noise, ask_to_move, evaluate, fleet_of, num_wrong, small_model

SIZE, BATCH, EPOCHS = 41, 4, 5
STEPS = -(-SIZE // BATCH)


class Numbered(Noise):
    """Gives the number of each sample in the place of a label."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return super().__getitem__(index)[0], index


@pytest.fixture(scope="module")
def fleet() -> Iterator[Any]:
    pipeline = SharedPipeline(train=Numbered(SIZE, augment=True), val=Noise(20))
    never = Checkpoints(interval_s=1e6)  # who is asked to stop is to move
    with fleet_of(devices=4, pipeline=pipeline, checkpoints=never) as executor:
        yield executor


def prepared(trial: Any) -> Any:
    model = small_model()
    return trial.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))


def all_are_asked(trial: Any) -> bool:
    is_asked = trial._session.stop_line._is_asked
    return bool(trial.sum(int(is_asked)) == trial.world_size)


def trains(
    trial: Any,
    *,
    asks: Mapping[int, Collection[int]],
    folder: Path,
    wait: bool = True,
    epochs: int = EPOCHS,
) -> float:
    """Asks to move at some of all its steps; notes which samples it has trained on."""
    model, optimizer = prepared(trial)
    losses = trial.state.setdefault("losses", [])
    draws = trial.state.setdefault("draws", [])
    means = trial.state.setdefault("means", [])
    for epoch in trial.epochs(epochs):
        optimizer.param_groups[0]["lr"] *= 0.9  # done again where the trial goes on
        model.train()
        for images, numbers in trial.batches("train", batch_size=BATCH, movable=True):
            loss = F.cross_entropy(model(images), numbers % 3)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trial.totals["loss"] += loss * trial.shard_size
            trial.totals["samples"] += trial.shard_size
            if trial.shard_size:
                with (folder / f"{trial.number}").open("a") as file:
                    file.write("".join(f"{epoch}/{number}\n" for number in numbers.tolist()))
            draws.append([random.random(), float(np.random.rand()), torch.rand(()).item()])
            losses.append(trial.mean(loss.item(), weight=trial.shard_size))
            if len(losses) - 1 in asks.get(trial.number, ()):
                ask_to_move(trial, wait=wait)
                while wait and not all_are_asked(trial):  # the order is on its way
                    trial.should_prune()
        means.append([trial.totals.mean("loss", "samples"), trial.totals["samples"]])
        trial.report(evaluate(trial, model, num_wrong) / 20, epoch)
    norm = model[1]
    trial.set_user_attr("draws", draws)
    trial.set_user_attr("means", means)
    trial.set_user_attr("losses", losses)
    trial.set_user_attr("norm", [*norm.running_mean.tolist(), *norm.running_var.tolist()])
    trial.set_user_attr("steps", norm.num_batches_tracked.item())
    return losses[-1]


def run(
    fleet: Any,
    script: dict[int, Sequence[Leg]],
    folder: Path,
    asks: Mapping[int, Collection[int]] | None = None,
    **more: Any,
) -> optuna.Study:
    study = optuna.create_study()
    folder.mkdir()
    fleet.script = script
    objective = functools.partial(trains, asks=asks or {}, folder=folder, **more)
    study.optimize(objective, n_trials=len(script), executor=fleet)
    for trial in study.trials:
        lines = (folder / f"{trial.number}").read_text().split()
        every = itertools.product(range(more.get("epochs", EPOCHS)), range(SIZE))
        assert Counter(lines) == Counter(f"{epoch}/{number}" for epoch, number in every)
    return study


def result(trial: Any) -> list[float]:
    given = trial.user_attrs
    means = [number for mean in given["means"] for number in mean]
    reports = trial.intermediate_values.values()
    return [*given["losses"], *means, *given["norm"], given["steps"], *reports]


def endings(study: optuna.Study, number: int = 0) -> list[str]:
    return [flight["ending"] for flight in flights_of(study)[number]]


@pytest.fixture(scope="module")
def undisturbed(fleet: Any, tmp_path_factory: pytest.TempPathFactory) -> optuna.Study:
    return run(fleet, {n: [Leg((n,))] for n in range(4)}, tmp_path_factory.mktemp("u") / "u")


def test_a_state_that_was_held_in_vain_is_not_lost(
    fleet: Any, undisturbed: optuna.Study, tmp_path: Path
) -> None:
    """The trial was to go on with the device that holds it, and gets another."""
    first = Leg((0, 1), until_asked=True, promised=(0, 2))
    moved = run(fleet, {0: [first, Leg((3,))]}, tmp_path / "m", {0: {15}})
    assert endings(moved) == ["yielded", "returned"]
    assert result(moved.trials[0]) == pytest.approx(result(undisturbed.trials[0]), rel=1e-10)


def goes_on_before_it_is_written(trial: Any, *, folder: Path, within: bool) -> float:
    """The first run's checkpoint is not written before the second one trains."""
    model, optimizer = prepared(trial)
    write, goes_on = Saver._write, folder / "goes on"

    def writes_later(*args: Any) -> None:
        until = time.monotonic() + 20.0
        while not goes_on.exists():
            if time.monotonic() > until:
                (folder / "in vain").touch()
                break
            time.sleep(0.01)
        write(*args)

    num_steps = trial.state.get("steps", 0)
    with mock.patch.object(Saver, "_write", writes_later):
        for _ in trial.epochs(2):
            for images, numbers in trial.batches("train", batch_size=BATCH, movable=within):
                F.cross_entropy(model(images), numbers % 3).backward()
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
    assert endings(study) == ["yielded", "returned"]
    assert study.trials[0].value == 2 * STEPS
    assert not (tmp_path / "in vain").exists()


def test_a_rate_is_measured_where_a_trial_goes_on_in_an_epochs_midst(
    fleet: Any, tmp_path: Path
) -> None:
    script = {0: [Leg((0,), until_asked=True), Leg((0, 1), measure=True)]}
    moved = run(fleet, script, tmp_path / "m", {0: {3}})
    assert endings(moved) == ["yielded", "returned"]


def has_long_epochs(trial: Any, *, movable: bool) -> float:
    prepared(trial)
    was, shard_loader._LONG_S = shard_loader._LONG_S, 0.0
    try:
        for _ in trial.epochs(3):
            for _ in trial.batches("train", batch_size=BATCH, movable=movable):
                pass
    finally:
        shard_loader._LONG_S = was
    return 0.0


@pytest.mark.parametrize("movable", [False, True])
def test_long_epochs_are_told_of_once(fleet: Any, movable: bool, log: io.StringIO) -> None:
    fleet.script = {n: [Leg((n,))] for n in range(2)}
    objective = functools.partial(has_long_epochs, movable=movable)
    optuna.create_study().optimize(objective, n_trials=2, executor=fleet)
    assert log.getvalue().count("movable=True") == (not movable)
