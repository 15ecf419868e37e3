"""What else there is to moves within an epoch than their results, which are in `behaviour`."""

from __future__ import annotations

import functools
import io
import itertools
import random
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch
import torch.nn.functional as F

from optuna_fleet import Checkpoints, SharedPipeline
from optuna_fleet.sampler_bridge.records import flights_of
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
    with (folder / "begun").open("a") as file:
        file.write(f"{trial._session.device} ")
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
            trial.totals["by label"] += torch.bincount(numbers % 3, minlength=3)
            if trial.shard_size:
                with (folder / f"{trial.number}").open("a") as file:
                    file.write("".join(f"{epoch}/{number}\n" for number in numbers.tolist()))
            draws.append([random.random(), float(np.random.rand()), torch.rand(()).item()])
            losses.append(trial.mean(loss.item(), weight=trial.shard_size))
            if len(losses) - 1 in asks.get(trial.number, ()):
                ask_to_move(trial, wait=wait)
                while wait and not all_are_asked(trial):  # others may have to rehearse first
                    trial.should_prune()
        sums = [trial.totals["samples"], *trial.totals["by label"].tolist()]
        means.append([trial.totals.mean("loss", "samples"), *sums])
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


def test_a_newcomer_may_join_a_run_whose_rate_is_measured(fleet: Any, tmp_path: Path) -> None:
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
