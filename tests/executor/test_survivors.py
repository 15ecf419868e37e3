"""Trials whose ranks die within an epoch go on from the step that the others were at."""

from __future__ import annotations

import functools
import os
import random
import signal
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel

from optuna_fleet import FleetExecutor, SharedPipeline
from optuna_fleet.executor.call.handovers import agreed
from optuna_fleet.policies import Elastic
from optuna_fleet.trainer.moves import holding
from tests.executor.test_within_epochs import (
    BATCH,
    SIZE,
    STEPS,
    Numbered,
    endings,
    fleet,
    result,
)
from tests.fleets import Leg, Noise, evaluate, num_wrong, small_model

__all__ = ["fleet"]  # a fixture

EPOCHS = 3
Kills = Mapping[int, tuple[str, tuple[int, ...]]]
"""By the number of the step: the moment in it, and the ranks that are killed then."""


def test_the_furthest_step_that_any_holds_is_the_one() -> None:
    assert agreed({4: (1, 0, 7), 2: (1, 0, 8), 3: (1, 0, 8)}) == (2, 3)
    assert agreed({2: (1, 0, 10), 1: (1, 1, 0)}) == (1,)
    assert agreed({5: (2, 0, 0), 6: (1, 9, 9)}) == (5,)
    assert agreed({}) == ()


def dies(trial: Any, folder: Path, kills: Kills, step: int, moment: str) -> None:
    """Each rank once."""
    when, ranks = kills.get(step, ("", ()))
    if moment == when and trial.rank in ranks:
        try:
            (folder / f"died {step} {trial.rank}").touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


def prepared(trial: Any, how: str) -> Any:
    model = small_model()
    model[0].bias = None  # Adam would make steps of any size out of rounding errors there
    kind = torch.optim.AdamW if how == "accumulates" else torch.optim.SGD
    more = {} if how == "accumulates" else {"momentum": 0.9}
    optimizer = kind(model.parameters(), lr=0.05, **more)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.95)
    parts = (model, optimizer, scheduler, AveragedModel(model))
    return trial.prepare(*parts, min_devices=2 if how == "on two at least" else 1)


def trains(trial: Any, *, how: str, kills: Kills, folder: Path, every: int = 1) -> float:
    """Notes which steps each run has computed; sums up in what moves along."""
    model, optimizer, scheduler, average = prepared(trial, how)
    losses = trial.state.setdefault("losses", [])
    draws, means = trial.state.setdefault("draws", []), trial.state.setdefault("means", [])
    # Which would depend on the time.
    trial._training.holding.is_due = lambda: how != "plain" and len(draws) % every == 0
    for epoch in trial.epochs(EPOCHS):
        model.train()
        for images, numbers in trial.batches("train", batch_size=BATCH, movable=True):
            step = len(draws)
            draws.append([random.random(), float(np.random.rand()), torch.rand(()).item()])
            happens = functools.partial(dies, trial, folder, kills, step)
            loss = F.cross_entropy(model(images) * (1 + draws[-1][2]), numbers % 3)
            handle = model[0].weight.register_hook(lambda _, happens=happens: happens("backward"))
            if how == "plain":
                trial.totals["loss"] += loss * trial.shard_size
                trial.totals["samples"] += trial.shard_size
            loss.backward()
            handle.remove()
            if how == "plain":
                losses.append(trial.mean(loss.item(), weight=trial.shard_size))
            with (folder / "done").open("a") as file:
                file.write(f"{trial._session.run.run_id}/{step}\n")
            if how != "accumulates" or step % 2:
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                average.update_parameters(model)
            happens("after")
            if how != "plain":
                trial.totals["loss"] += loss * trial.shard_size
                trial.totals["samples"] += trial.shard_size
                losses.append(trial.mean(loss.item(), weight=trial.shard_size))
            happens("end")
        means.append([trial.totals.mean("loss", "samples"), trial.totals["samples"]])
        wrong = evaluate(trial, average, num_wrong)
        dies(trial, folder, kills, len(draws), "evaluated")
        trial.report(wrong / 20, epoch)
    norm = average.module[1]
    trial.set_user_attr("draws", draws)
    trial.set_user_attr("means", means)
    trial.set_user_attr("losses", losses)
    trial.set_user_attr("norm", [*norm.running_mean.tolist(), *norm.running_var.tolist()])
    trial.set_user_attr("steps", norm.num_batches_tracked.item())
    return losses[-1]


def num_repeated(folder: Path) -> int:
    """How many steps were computed more than once; none was skipped."""
    runs = defaultdict(set)
    for line in (folder / "done").read_text().split():
        run, step = line.split("/")
        runs[int(step)].add(run)
    assert sorted(runs) == list(range(EPOCHS * STEPS))
    return sum(len(by) - 1 for by in runs.values())


Sweep = Callable[..., optuna.Study]


@pytest.fixture
def sweep(fleet: Any, tmp_path: Path) -> Sweep:
    def run(*legs: Leg, kills: Kills, **more: Any) -> optuna.Study:
        study = optuna.create_study()
        fleet.script = {0: legs}
        objective = functools.partial(trains, kills=kills, folder=tmp_path, **more)
        study.optimize(objective, n_trials=1, executor=fleet)
        return study

    return run


@pytest.fixture(scope="module")
def undisturbed(fleet: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    known: dict[str, Any] = {}

    def of(how: str) -> Any:
        if how not in known:
            study = optuna.create_study()
            fleet.script = {0: [Leg((0,))]}
            folder = tmp_path_factory.mktemp("undisturbed")
            objective = functools.partial(trains, how=how, kills={}, folder=folder)
            study.optimize(objective, n_trials=1, executor=fleet)
            known[how] = study.trials[0]
        return known[how]

    return of


def check_equal(study: optuna.Study, alone: Any) -> None:
    (trial,) = study.trials
    assert result(trial) == pytest.approx(result(alone), rel=1e-10)
    assert trial.user_attrs["draws"] == alone.user_attrs["draws"]


PLAIN, SOME, GATHERS = ("plain", 1), ("", 3), ("accumulates", 1)
LOSSES: list[tuple[tuple[str, int], Kills, list[tuple[int, ...]]]] = [
    (PLAIN, {5: ("backward", (1,))}, [(0, 2)]),
    (GATHERS, {0: ("end", (0,))}, [(3, 2, 1)]),
    (GATHERS, {12: ("after", (2,))}, [(0, 1, 3)]),
    (PLAIN, {12: ("after", (2,)), 13: ("backward", (1,))}, [(0, 1, 3), (0, 3)]),
    (PLAIN, {STEPS - 1: ("end", (0,))}, [(1,)]),
    (GATHERS, {2 * STEPS: ("evaluated", (0,))}, [(2, 1)]),
    (GATHERS, {7: ("backward", (0, 1))}, [(0, 2)]),
    (PLAIN, {6: ("backward", (1,)), 17: ("end", (0,))}, [(2, 0, 3), (0, 3)]),
    (GATHERS, {9: ("after", (1,))}, [(3,)]),  # who survives writes it down
]


@pytest.mark.parametrize(
    ("how", "every", "kills", "devices"),
    [(*kind, kills, devices) for how, kills, devices in LOSSES for kind in (SOME, how)],
)
def test_it_goes_on_from_the_last_step_that_is_held(
    sweep: Sweep,
    undisturbed: Any,
    tmp_path: Path,
    how: str,
    every: int,
    kills: Kills,
    devices: Any,
) -> None:
    """At most one batch is computed twice, or so many where others are needed after the step."""
    legs = [Leg((0, 1, 2)), *map(Leg, devices)]
    study = sweep(*legs, how=how, kills=kills, every=every)
    check_equal(study, undisturbed(how))
    assert endings(study) == ["lost"] * len(kills) + ["returned"]
    assert num_repeated(tmp_path) <= every * len(kills)


def test_it_begins_anew_where_nobody_survives(
    sweep: Sweep, undisturbed: Any, tmp_path: Path
) -> None:
    study = sweep(Leg((0, 1)), Leg((2, 3)), how="", kills={5: ("backward", (0, 1))})
    check_equal(study, undisturbed(""))
    assert num_repeated(tmp_path) == 5


def test_who_survives_goes_on_with_what_is_left(undisturbed: Any, tmp_path: Path) -> None:
    """And with what comes: by the real controller."""
    pipeline = SharedPipeline(train=Numbered(SIZE, augment=True), val=Noise(20))
    study = optuna.create_study()
    kills: Kills = {8: ("backward", (1,)), 20: ("after", (0,))}
    objective = functools.partial(trains, how="on two at least", kills=kills, folder=tmp_path)
    with FleetExecutor(pipeline, devices=3, device_type="cpu", policy=Elastic()) as executor:
        study.optimize(objective, n_trials=1, executor=executor)
    check_equal(study, undisturbed(""))
    assert endings(study).count("lost") == 2
    assert num_repeated(tmp_path) <= 2


def tells_before_it_steps(trial: Any, kills: Kills, folder: Path) -> float:
    trial.set_user_attr("best before", trial.best_value)
    model, optimizer, *_ = prepared(trial, "plain")
    trial.state["step"] = 0
    for _ in trial.epochs(1):
        for images, numbers in trial.batches("train", batch_size=BATCH, movable=True):
            step = trial.state["step"]
            optimizer.zero_grad()
            F.cross_entropy(model(images), numbers % 3).backward()
            dies(trial, folder, kills, step, "reduced")
            trial.report(step, step)
            trial.set_user_attr(str(step), trial.rank)
            optimizer.step()
            trial.state["step"] += 1
    return 0.0


@pytest.mark.parametrize(("dead", "then"), [((1,), (0, 2)), ((0,), (1, 2)), ((0, 2), (1,))])
def test_what_only_some_ranks_have_told_is_not_lost(
    fleet: Any, tmp_path: Path, dead: tuple[int, ...], then: tuple[int, ...]
) -> None:
    """Those that survive are at the next step already."""
    study = optuna.create_study()
    fleet.script = {0: [Leg((0, 1, 2)), Leg(then)]}
    kills: Kills = {7: ("reduced", dead)}
    objective = functools.partial(tells_before_it_steps, kills=kills, folder=tmp_path)
    study.optimize(objective, n_trials=1, executor=fleet)
    (trial,) = study.trials
    assert endings(study) == ["lost", "returned"]
    assert trial.intermediate_values == {step: step for step in range(STEPS)}
    assert trial.user_attrs.pop("best before") == 0.0
    assert trial.user_attrs.keys() == {str(step) for step in range(STEPS)}
    assert trial.user_attrs.pop("7") == (1 if 0 in dead else 0)
    assert set(trial.user_attrs.values()) == {0}


def held_in(trial: Any, epoch: int) -> float:
    """The epoch that a rank would go back to from the beginning of this one; only 0 is movable."""
    model, optimizer, *_ = prepared(trial, "plain")
    for now in trial.epochs(3):
        if now == epoch:
            held = trial._training.holding.held()
            return -1.0 if held is None else float(held.place[1])
        for images, numbers in trial.batches("train", batch_size=BATCH, movable=now == 0):
            optimizer.zero_grad()
            F.cross_entropy(model(images), numbers % 3).backward()
            optimizer.step()
    raise AssertionError(epoch)


@pytest.mark.parametrize(("epoch", "held"), [(1, 0.0), (2, -1.0)])
def test_nobody_goes_back_over_an_epoch_that_was_not_movable(
    monkeypatch: pytest.MonkeyPatch, epoch: int, held: float
) -> None:
    """The checkpoint of its end, perhaps, is further."""
    monkeypatch.setattr(holding, "outlives_peers", lambda: True)
    study = optuna.create_study()
    with FleetExecutor(SharedPipeline(train=Numbered(SIZE)), cluster="inline") as executor:
        study.optimize(functools.partial(held_in, epoch=epoch), n_trials=1, executor=executor)
    assert study.best_value == held
