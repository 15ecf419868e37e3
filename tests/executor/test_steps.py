"""Trials that count steps: they see what trials that count epochs do, wherever they train."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import optuna
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from optuna_fleet import FleetExecutor, SharedPipeline
from optuna_fleet.events import DataRequested
from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.sampler_bridge.records import flights_of
from optuna_fleet.trainer.data.reading import Periods, Start
from tests.fleets import Leg, Noise, ask_to_move, evaluate, fleet_of, num_wrong, run, small_model

SIZE, BATCH = 41, 8  # 6 steps an epoch
STEPS, EVERY = 20, 4  # periods over an epoch's end, and up to one


class Numbered(Noise):
    """Gives the number of each sample in the place of a label."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return super().__getitem__(index)[0], index


def pipeline(**options: Any) -> SharedPipeline:
    return SharedPipeline(train=Numbered(SIZE, augment=True), val=Noise(20), **options)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Any]:
    with fleet_of(devices=3, pipeline=pipeline()) as executor:
        yield executor


def trains(
    trial: Any,
    *,
    loop: Any = lambda trial: trial.steps(STEPS, every=EVERY),
    drop_last: bool = False,
    asks: Sequence[int] = (),
) -> float:
    """Notes the loss and the samples of each step, and asks to move after some of them."""
    model = small_model()
    model, optimizer = trial.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    )
    steps = trial.state.setdefault("steps", [])
    lengths = trial.state.setdefault("lengths", [])
    for period in loop(trial):
        model.train()
        batches = trial.batches("train", BATCH, drop_last=drop_last, movable=bool(asks))
        for images, numbers in batches:
            loss = F.cross_entropy(model(images), numbers % 3)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen = torch.bincount(numbers, minlength=SIZE) * bool(trial.shard_size)
            seen = trial.sum(seen).nonzero().flatten().tolist()
            steps.append([trial.mean(loss.item(), weight=trial.shard_size), seen])
            if len(steps) - 1 in asks:
                ask_to_move(trial)
        lengths.append(len(batches))
        trial.report(evaluate(trial, model, num_wrong) / 20, period)
    trial.set_user_attr("steps", steps)
    trial.set_user_attr("lengths", lengths)
    return float(steps[-1][0])


def losses(trial: optuna.trial.FrozenTrial) -> list[float]:
    return [loss for loss, _ in trial.user_attrs["steps"]]


def samples(trial: optuna.trial.FrozenTrial) -> list[list[int]]:
    return [seen for _, seen in trial.user_attrs["steps"]]


@pytest.fixture(scope="module")
def alone(fleet: Any) -> optuna.trial.FrozenTrial:
    return run(fleet, trains, Leg((0,)))


@pytest.mark.parametrize("drop_last", [False, True])
def test_periods_cut_the_epochs_that_other_trials_have(fleet: Any, drop_last: bool) -> None:
    by_steps = run(fleet, functools.partial(trains, drop_last=drop_last), Leg((0,)))
    in_epochs = functools.partial(trains, loop=lambda trial: trial.epochs(4), drop_last=drop_last)
    by_epochs = run(fleet, in_epochs, Leg((0,)))
    assert by_steps.user_attrs["steps"] == by_epochs.user_attrs["steps"][:STEPS]
    assert by_steps.user_attrs["lengths"] == [EVERY] * 5
    per_epoch = SIZE // BATCH + (not drop_last)
    first = list(itertools.chain(*samples(by_steps)[:per_epoch]))
    assert len(set(first)) == len(first) == (SIZE if not drop_last else SIZE // BATCH * BATCH)


@pytest.mark.parametrize(
    "legs",
    [
        [Leg((0, 1))],
        [Leg((0, 1, 2))],
        [Leg((0, 1), 2), Leg((2,))],
        [Leg((1,), 1), Leg((0, 1, 2), 4), Leg((0, 2))],
    ],
)
def test_results_do_not_depend_on_where(
    fleet: Any, alone: optuna.trial.FrozenTrial, legs: list[Leg]
) -> None:
    trial = run(fleet, trains, *legs)
    assert losses(trial) == pytest.approx(losses(alone), rel=1e-10)
    assert samples(trial) == samples(alone)
    assert trial.intermediate_values == alone.intermediate_values


def test_a_move_within_a_period(fleet: Any, alone: optuna.trial.FrozenTrial) -> None:
    # In the midst of an epoch, at its end, and after it.
    legs = [Leg((0,), until_asked=True), Leg((0, 1), until_asked=True)]
    study = optuna.create_study()
    fleet.script = {0: [*legs, Leg((1, 2), until_asked=True), Leg((2,))]}
    moves = functools.partial(trains, asks=(1, 4, 9))
    study.optimize(moves, n_trials=1, executor=fleet)
    (trial,) = study.trials
    assert len(flights_of(study)[0]) == 4
    assert losses(trial) == pytest.approx(losses(alone), rel=1e-10)
    assert samples(trial) == samples(alone)


def counts(trial: Any) -> float:
    """How many batches there are, where."""
    model = small_model()
    trial.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    before = len(trial.batches("train", 8))
    for _ in trial.steps(10, every=8):
        read = [len(list(trial.batches(name))) for name in ("train", "val")]
        trial.set_user_attr(str(len(trial.user_attrs)), [len(trial.batches("train")), *read])
    for _ in trial.steps(10, every=4):
        break
    after = len(trial.batches("train"))
    trial.set_user_attr("around", [before, after])
    return 0.0


EXPECTED = {"0": [8, 8, 3], "1": [2, 2, 3], "around": [6, 6]}


def test_how_many_batches_there_are(fleet: Any) -> None:
    assert run(fleet, counts, Leg((0,))).user_attrs == EXPECTED


@pytest.mark.parametrize("options", [{"order": "rolling"}, {}])
def test_without_processes_and_with_data_that_roll(options: Any) -> None:
    cluster: Any = "local" if options else "inline"
    study = optuna.create_study()
    with FleetExecutor(pipeline(**options), devices=1, cluster=cluster) as executor:
        study.optimize(counts, n_trials=1, executor=executor)
    assert study.trials[0].user_attrs == EXPECTED


def six_steps(epoch: int, first_step: int = 0, continues: bool = False) -> list[Any]:
    return [(epoch, step, continues) for step in range(first_step, 6)]


def test_a_period_goes_on_in_the_data() -> None:
    periods = Periods(16, 4)
    goes_on = [(1, step, True) for step in (2, 3, 4, 5)]
    assert list(periods.batches(six_steps, 2, 0, Start())) == goes_on
    assert list(periods.batches(six_steps, 2, 3, Start())) == goes_on[3:]
    assert list(periods.batches(six_steps, 3, 0, Start())) == [(2, s, False) for s in range(4)]
    rolls = [(7, 4, True), (7, 5, True), (8, 0, False), (8, 1, False)]
    assert list(periods.batches(six_steps, 2, 0, Start(epoch=7, step=4))) == rolls


def counts_samples(trial: Any) -> float:
    """Trains on 3 of the 40 batches of an epoch at a time, four times on all of them."""
    model = nn.Linear(1, 1)
    model, optimizer = trial.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    counts = torch.zeros(200)
    for _ in trial.steps(160, every=3):
        for images, numbers in trial.batches("train", 5):
            optimizer.zero_grad()
            model(images).mean().backward()
            optimizer.step()
            counts[numbers[: trial.shard_size]] += 1
    trial.set_user_attr("counts", trial.sum(counts).tolist())
    return 0.0


class Indices(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.zeros(1), index


def test_data_that_roll_are_all_read() -> None:
    with fleet_of(devices=2, pipeline=SharedPipeline(train=Indices(), order="rolling")) as fleet:
        counts = run(fleet, counts_samples, Leg((0, 1))).user_attrs["counts"]
    assert sum(counts) == 160 * 5
    assert min(counts) >= 3


def two_loops(trial: Any) -> float:
    """Loops over as many epochs and periods, after a look at the data."""
    model = small_model()
    trial.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    for loop in ([0], trial.epochs(2), trial.steps(8, every=4)):
        for _ in loop:
            for name in ("val", "train", "val"):
                next(iter(trial.batches(name, BATCH)))
    return 0.0


def test_plans_know_how_long_each_loop_is(fleet: Any) -> None:
    run(fleet, two_loops, Leg((0,)))
    models = [event.model for event in fleet.events if isinstance(event, DataRequested)]
    told = [(model.samples_per_epoch, model.max_epochs) for model in models]
    assert told == [(20, None), (SIZE, None), (SIZE, 2), (EVERY * BATCH, 2)]


def test_plans_know_how_long_it_is(fleet: Any) -> None:
    run(fleet, trains, Leg((0,)))
    (model,) = {event.model for event in fleet.events if isinstance(event, DataRequested)}
    assert (model.samples_per_epoch, model.max_epochs) == (EVERY * BATCH, STEPS // EVERY)


@pytest.mark.parametrize("given", [(0, 5), (10, 0), (10, 2.5), (True, 1)])
def test_what_is_no_number_of_steps(given: tuple[Any, Any]) -> None:
    def objective(trial: Any) -> float:
        trial.steps(given[0], every=given[1])
        return 0.0

    with pytest.raises(FleetConfigError, match="must be a whole number >= 1"):
        optuna.create_study().optimize(
            objective, n_trials=1, executor=FleetExecutor(cluster="inline")
        )
