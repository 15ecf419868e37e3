"""Movable batches are checkpointed as they are trained on, and a death costs what came after."""

from __future__ import annotations

import functools
import os
import random
import re
import signal
import threading
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel

from optuna_fleet import Checkpoints, FleetExecutor, SharedPipeline
from optuna_fleet.policies import Elastic
from optuna_fleet.sampler_bridge.records import flights_of
from tests.behaviour.small import Noise, evaluate, num_wrong, small_model
from tests.fleets import Leg, ask_to_move, fleet_of
from tests.waiting import until

SIZE, BATCH, EPOCHS = 41, 4, 3
STEPS = -(-SIZE // BATCH)
Kills = Mapping[int, tuple[str, tuple[int, ...]]]
"""By the number of the step: the moment in it, and the ranks that are killed then."""


class Numbered(Noise):
    """Gives the number of each sample in the place of a label."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return super().__getitem__(index)[0], index


def pipeline() -> SharedPipeline:
    return SharedPipeline(train=Numbered(SIZE, augment=True), val=Noise(20))


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Any]:
    """It saves as often as it can."""
    due = Checkpoints(tmp_path / "checkpoints", interval_s=0)
    with fleet_of(devices=4, pipeline=pipeline(), checkpoints=due) as executor:
        yield executor


def saved(folder: Path) -> list[int]:
    """The steps, counted over epochs, of which there is a checkpoint within an epoch."""
    files = [path.name for path in folder.glob("checkpoints/*/trial-*.pt")]
    matches = [re.fullmatch(r"trial-0\.1-(\d+)-(\d+)\.[0-9a-f]+-\d+\.pt", name) for name in files]
    return [int(match[1]) * STEPS + int(match[2]) for match in matches if match]


def dies(trial: Any, folder: Path, kills: Kills, *, begun: int, step: int, moment: str) -> None:
    """In the first run that comes here, when the driver has been told of a checkpoint."""
    when, ranks = kills.get(step, ("", ()))
    known = folder / f"known {step}"
    if moment != when:
        return
    if trial.rank == 0 and not known.exists():
        until(lambda: max(saved(folder), default=0) > step // STEPS * STEPS and not is_writing())
        (folder / "writing").write_text(f"{max(saved(folder))} {begun}")
        (folder / "writing").rename(known)
    if trial.rank in ranks:
        until(known.exists)
        if known.read_text().endswith(f" {begun}"):
            os.kill(os.getpid(), signal.SIGKILL)


def is_writing() -> bool:
    """Whether this process is at a checkpoint, of which it tells when the file is there."""
    return any(thread.name == "optuna-fleet-checkpoint" for thread in threading.enumerate())


def prepared(trial: Any, how: str) -> Any:
    model = small_model()
    model[0].bias = None  # Adam would make steps of any size out of rounding errors there
    kind = torch.optim.AdamW if how == "accumulates" else torch.optim.SGD
    more = {} if how == "accumulates" else {"momentum": 0.9}
    optimizer = kind(model.parameters(), lr=0.05, **more)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.95)
    parts = (model, optimizer, scheduler, AveragedModel(model))
    return trial.prepare(*parts, min_devices=2 if how == "on two at least" else 1)


def trains(
    trial: Any,
    *,
    how: str,
    kills: Kills,
    folder: Path,
    moves_at: Collection[int] = (),
    waits: bool = True,
) -> float:
    """Notes which steps were computed since the objective began; sums up in what moves along."""
    model, optimizer, scheduler, average = prepared(trial, how)
    losses = trial.state.setdefault("losses", [])
    draws, means = trial.state.setdefault("draws", []), trial.state.setdefault("means", [])
    begun: int | None = None
    for epoch in trial.epochs(EPOCHS):
        model.train()
        for images, numbers in trial.batches("train", batch_size=BATCH, movable=True):
            step = len(draws)
            begun = step if begun is None else begun
            draws.append([random.random(), float(np.random.rand()), torch.rand(()).item()])
            happens = functools.partial(dies, trial, folder, kills, begun=begun, step=step)
            loss = F.cross_entropy(model(images) * (1 + draws[-1][2]), numbers % 3)
            handle = model[0].weight.register_hook(
                lambda _, happens=happens: happens(moment="backward")
            )
            loss.backward()
            handle.remove()
            if trial.rank == 0:
                with (folder / "done").open("a") as file:
                    file.write(f"{begun}/{step}\n")
            if how != "accumulates" or step % 2:
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                average.update_parameters(model)
            happens(moment="after")
            trial.totals["loss"] += loss * trial.shard_size
            trial.totals["samples"] += trial.shard_size
            losses.append(trial.mean(loss.item(), weight=trial.shard_size))
            trial.should_prune()  # when it has answered twice, the driver has asked for a step
            if kills:  # on a busy machine the first checkpoint would else be the only one for long
                until(lambda: not is_writing())
            happens(moment="end")
            if step in moves_at:
                ask_to_move(trial, wait=waits)
        means.append([trial.totals.mean("loss", "samples"), trial.totals["samples"]])
        trial.report(evaluate(trial, average, num_wrong) / 20, epoch)
    norm = average.module[1]
    trial.set_user_attr("draws", draws)
    trial.set_user_attr("means", means)
    trial.set_user_attr("losses", losses)
    trial.set_user_attr("norm", [*norm.running_mean.tolist(), *norm.running_var.tolist()])
    trial.set_user_attr("steps", norm.num_batches_tracked.item())
    return losses[-1]


def run(
    executor: Any, folder: Path, how: str, kills: Kills, *legs: Leg, **more: Any
) -> optuna.Study:
    study = optuna.create_study()
    folder.mkdir(exist_ok=True)
    if legs:
        executor.script = {0: legs}
    objective = functools.partial(trains, how=how, kills=kills, folder=folder, **more)
    study.optimize(objective, n_trials=1, executor=executor)
    return study


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By how, and on how many devices: neither killed nor saved within an epoch."""
    never = Checkpoints(interval_s=1e6)
    with fleet_of(devices=3, pipeline=pipeline(), checkpoints=never) as executor:

        @functools.cache
        def of(how: str, num_devices: int = 1) -> Any:
            folder = tmp_path_factory.mktemp("undisturbed")
            return run(executor, folder, how, {}, Leg(tuple(range(num_devices)))).trials[0]

        yield of


def result(trial: Any) -> list[float]:
    given = trial.user_attrs
    means = [number for mean in given["means"] for number in mean]
    reports = trial.intermediate_values.values()
    return [*given["losses"], *means, *given["norm"], given["steps"], *reports]


def endings(study: optuna.Study) -> list[str]:
    return [flight["ending"] for flight in flights_of(study)[0]]


def check_equal(study: optuna.Study, alone: Any) -> None:
    (trial,) = study.trials
    assert result(trial) == pytest.approx(result(alone), rel=1e-10)
    assert trial.user_attrs["draws"] == alone.user_attrs["draws"]


def check_repeated(folder: Path, kills: Kills, *, moves: int = 0) -> None:
    """After a death it begins with the step of a checkpoint no older than was known by then.

    And so many times, before that, where it has moved.
    """
    lines = [tuple(map(int, line.split("/"))) for line in (folder / "done").read_text().split()]
    begun = sorted({first for first, _ in lines})
    seen = [int((folder / f"known {step}").read_text().split()[0]) for step in sorted(kills)]
    assert begun[0] == 0
    assert len(begun) == 1 + moves + len(kills)
    for first, died, known in zip(begun[1 + moves :], sorted(kills), seen, strict=True):
        assert died // STEPS * STEPS < known <= first <= died
    assert {step for _, step in lines} == set(range(EPOCHS * STEPS))


DEATHS: list[tuple[str, Kills, list[tuple[int, ...]]]] = [
    ("accumulates", {8: ("after", (0,))}, [(0,), (1, 2)]),
    ("plain", {6: ("backward", (1,)), 2 * STEPS + 5: ("end", (0,))}, [(0, 1), (2, 0, 3), (0, 3)]),
]


@pytest.mark.parametrize(("how", "kills", "devices"), DEATHS)
def test_a_death_costs_the_steps_since_the_last_checkpoint(
    fleet: Any, undisturbed: Any, tmp_path: Path, how: str, kills: Kills, devices: Any
) -> None:
    study = run(fleet, tmp_path, how, kills, *map(Leg, devices))
    check_equal(study, undisturbed(how))
    assert endings(study) == ["lost"] * len(kills) + ["returned"]
    check_repeated(tmp_path, kills)


def test_it_goes_on_with_what_is_left(undisturbed: Any, tmp_path: Path) -> None:
    """And with what comes: by the real controller."""
    due = Checkpoints(tmp_path / "checkpoints", interval_s=0)
    options: dict[str, Any] = {"policy": Elastic(), "checkpoints": due}
    kills: Kills = {8: ("backward", (1,)), STEPS + 9: ("after", (0,))}
    with FleetExecutor(pipeline(), devices=3, device_type="cpu", **options) as executor:
        study = run(executor, tmp_path, "on two at least", kills)
    check_equal(study, undisturbed(""))
    assert endings(study).count("lost") == 2


def test_to_be_saved_changes_nothing(fleet: Any, undisturbed: Any, tmp_path: Path) -> None:
    study = run(fleet, tmp_path, "accumulates", {}, Leg((0,)))
    assert endings(study) == ["returned"]
    assert result(study.trials[0]) == result(undisturbed("accumulates"))
    assert study.trials[0].user_attrs["draws"] == undisturbed("accumulates").user_attrs["draws"]


def test_moves_while_it_is_being_saved_change_nothing(
    fleet: Any, undisturbed: Any, tmp_path: Path
) -> None:
    """Be it that they were to be saved at the same step."""
    chance = random.Random(0)
    asks = set(chance.sample(range(EPOCHS * STEPS - 1), 6))
    widths = [tuple(chance.sample(range(4), chance.randint(1, 4))) for _ in asks]
    legs = [Leg(devices, until_asked=True) for devices in widths]
    study = run(fleet, tmp_path, "plain", {}, *legs, Leg((0,)), moves_at=asks, waits=False)
    check_equal(study, undisturbed("plain"))


def test_a_state_that_was_held_in_vain_is_not_lost(
    fleet: Any, undisturbed: Any, tmp_path: Path
) -> None:
    """The trial may have been to go on with the device that holds it; its rate is measured."""
    legs = [Leg((0, 1), until_asked=True, promised=(0, 2)), Leg((3, 1), measure=True)]
    study = run(fleet, tmp_path, "plain", {}, *legs, moves_at={15})
    check_equal(study, undisturbed("plain"))
    assert endings(study) == ["yielded", "returned"]
    check_repeated(tmp_path, {}, moves=1)
