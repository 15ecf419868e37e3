"""Trials that move within an epoch give what they would have given undisturbed."""

from __future__ import annotations

import functools
import io
import itertools
import os
import random
import signal
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch
import torch.nn.functional as F

from optuna_fleet import Checkpoints, FleetExecutor, SharedPipeline
from optuna_fleet.events import MoveMeasured, MoveRefused
from optuna_fleet.policies import Own
from optuna_fleet.sampler_bridge.records import flights_of
from optuna_fleet.trainer.data import shard_loader
from tests.executor.test_refused_moves import Restless
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


@pytest.mark.parametrize("devices", [[(0,), (1,), (2,), (3,)], [(0, 1, 2), (1, 2, 3)] * 2])
def test_on_equally_many_devices_it_goes_on_bit_for_bit(
    fleet: Any, tmp_path: Path, devices: list[tuple[int, ...]]
) -> None:
    legs = [Leg(some, until_asked=True) for some in devices]
    moved = run(fleet, {0: [*legs, Leg(devices[0])]}, tmp_path / "m", {0: {3, 4, 15, 30}})
    assert sum(isinstance(event, MoveMeasured) for event in fleet.events) == 4
    alone = run(fleet, {0: [Leg(devices[0])]}, tmp_path / "a")
    assert endings(moved) == ["yielded"] * 4 + ["returned"]
    assert result(moved.trials[0]) == result(alone.trials[0])
    assert moved.trials[0].user_attrs["draws"] == alone.trials[0].user_attrs["draws"]


def test_a_newcomer_may_join_a_run_whose_rate_is_measured(fleet: Any, tmp_path: Path) -> None:
    script = {0: [Leg((0,), until_asked=True), Leg((0, 1), measure=True)]}
    moved = run(fleet, script, tmp_path / "m", {0: {3}})
    assert endings(moved) == ["yielded", "returned"]


@pytest.mark.parametrize("wait", [True, False], ids=["at that step", "at any step"])
def test_twenty_moves_within_epochs_change_nothing(
    fleet: Any, undisturbed: optuna.Study, tmp_path: Path, wait: bool
) -> None:
    chance, per_trial = random.Random(14), 5
    asks = {n: set(chance.sample(range(EPOCHS * STEPS - 1), per_trial)) for n in range(4)}
    script = {
        n: [
            Leg(tuple(chance.sample(range(4), chance.randint(1, 4))), until_asked=True)
            for _ in range(per_trial)
        ]
        for n in range(4)
    }
    script = {n: [*legs, Leg((n,))] for n, legs in script.items()}
    moved = run(fleet, script, tmp_path / "m", asks, wait=wait)
    for trial, alone in zip(moved.trials, undisturbed.trials, strict=True):
        assert result(trial) == pytest.approx(result(alone), rel=1e-10)
        assert trial.user_attrs["draws"] == alone.user_attrs["draws"]
    if wait:
        assert sum(len(endings(moved, n)) for n in range(4)) == 4 * (per_trial + 1)


# -- what is not left in its midst ----------------------------------------------------------------


def reads_ahead(trial: Any) -> Iterator[Any]:
    """Each batch is fetched before the one before it is used."""
    fetched = iter(trial.batches("train", batch_size=BATCH, movable=True))
    batch = next(fetched)
    for following in fetched:
        yield batch
        batch = following
    yield batch


def evaluates_first(trial: Any) -> Iterator[Any]:
    for _ in trial.batches("val", batch_size=8):
        pass
    return iter(trial.batches("train", batch_size=BATCH, movable=True))


def reads_two(trial: Any) -> Iterator[Any]:
    first, second = (trial.batches("train", batch_size=BATCH, movable=True) for _ in range(2))
    return (pair[0] for pair in zip(first, second, strict=True))


def reads_what_can_not_move(trial: Any) -> Iterator[Any]:
    return iter(trial.batches("train", batch_size=BATCH))


def asks_at_once(trial: Any, *, read: Any) -> float:
    """Asks to move in each run's second epoch; notes with how many steps each run has begun."""
    model, optimizer = prepared(trial)
    steps = trial.state.setdefault("steps", [])
    begun = len(steps)
    for _ in trial.epochs(3):
        for step, (images, numbers) in enumerate(read(trial)):
            optimizer.zero_grad()
            F.cross_entropy(model(images), numbers % 3).backward()
            optimizer.step()
            steps.append(begun)
            if step == 1 and len(steps) > STEPS:  # in the second epoch
                ask_to_move(trial)
    trial.set_user_attr("begun", sorted(set(steps)))
    return float(len(steps))


@pytest.mark.parametrize("devices", [(0,), (1, 2)])
@pytest.mark.parametrize(
    "read", [reads_ahead, evaluates_first, reads_two, reads_what_can_not_move]
)
def test_a_pass_that_can_not_go_on_elsewhere_is_read_to_its_end(
    fleet: Any, devices: tuple[int, ...], read: Any
) -> None:
    study = optuna.create_study()
    fleet.script = {0: [Leg(devices, until_asked=True), Leg(devices)]}
    study.optimize(functools.partial(asks_at_once, read=read), n_trials=1, executor=fleet)
    assert endings(study) == ["yielded", "returned"]
    assert study.trials[0].user_attrs["begun"] == [0, 2 * STEPS]
    assert study.trials[0].value == 3 * STEPS


class Stubborn:
    """Has a state that nobody can save."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("my state is mine")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("nobody can have saved it")


def stays(trial: Any) -> float:
    trial.prepare(Stubborn())
    return asks_at_once(trial, read=reads_what_is_movable)


def reads_what_is_movable(trial: Any) -> Any:
    return trial.batches("train", batch_size=BATCH, movable=True)


@pytest.mark.parametrize("devices", [(0,), (1, 2)])
def test_a_trial_that_can_not_be_checkpointed_goes_on_where_it_is(
    fleet: Any, devices: tuple[int, ...]
) -> None:
    study = optuna.create_study()
    fleet.script = {0: [Leg(devices, until_asked=True)]}
    study.optimize(stays, n_trials=1, executor=fleet)
    assert endings(study) == ["returned"]
    assert study.trials[0].value == 3 * STEPS
    assert any(isinstance(event, MoveRefused) for event in fleet.events)


def fails_on_one_rank(trial: Any) -> float:
    model, optimizer = prepared(trial)
    for _ in trial.epochs(2):
        for images, numbers in reads_what_is_movable(trial):
            optimizer.zero_grad()
            F.cross_entropy(model(images), numbers % 3).backward()
            optimizer.step()
            ask_to_move(trial)
            if trial.rank == 1:
                raise ValueError("planted")
    return 0.0


def test_a_rank_that_fails_while_the_others_stop_is_the_cause(fleet: Any) -> None:
    study = optuna.create_study()
    fleet.script = {0: [Leg((0, 1, 2), until_asked=True)]}
    study.optimize(fails_on_one_rank, n_trials=1, executor=fleet, catch=(ValueError,))
    assert study.trials[0].state is optuna.trial.TrialState.FAIL
    assert endings(study) == ["raised"]


# -- with the real controller ---------------------------------------------------------------------


def moves_and_dies(trial: Any, *, folder: Path, dies: bool) -> float:
    """Waits in two of its steps until it is told to move; is killed soon after the first time."""
    model, optimizer = prepared(trial)
    losses = trial.state.setdefault("losses", [])
    for _ in trial.epochs(2):
        for images, numbers in reads_what_is_movable(trial):
            loss = F.cross_entropy(model(images), numbers % 3)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if dies and len(losses) == 6 and not (folder / "died").exists():
                (folder / "died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if dies and len(losses) in (4, 17):
                ask_to_move(trial)
                while not trial._session.stop_line._is_asked:
                    trial.should_prune()  # the plan is being made
        trial.state["last"] = trial.totals["nothing"]
    trial.set_user_attr("losses", losses)
    return losses[-1]


def test_a_trial_killed_within_an_epoch_goes_on_from_where_it_moved_to(tmp_path: Path) -> None:
    policy = Own(
        allocator=Restless(), paradigm="elastic", moves_within_epochs=True, time_limit_s=600.0
    )
    pipeline = SharedPipeline(train=Numbered(SIZE, augment=True), val=Noise(20))
    moved, alone = optuna.create_study(), optuna.create_study()
    options: dict[str, Any] = {"policy": policy, "checkpoints": Checkpoints(interval_s=1e6)}
    with FleetExecutor(pipeline, devices=2, device_type="cpu", **options) as fleet:
        for study, dies in ((moved, True), (alone, False)):
            objective = functools.partial(moves_and_dies, folder=tmp_path, dies=dies)
            study.optimize(objective, n_trials=1, executor=fleet)
    assert moved.trials[0].user_attrs["losses"] == alone.trials[0].user_attrs["losses"]
    assert endings(moved).count("lost") == 1
    assert endings(moved).count("yielded") >= 2


# -- the hint -------------------------------------------------------------------------------------


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
