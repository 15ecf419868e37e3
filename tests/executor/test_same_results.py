"""G2: allocation does not change results."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from optuna_fleet import Checkpoints
from optuna_fleet.sampler_bridge.records import flights_of
from tests.fleets import Leg, fleet_of, small_model, train


def losses_of(
    fleet: Any, script: dict[int, Sequence[Leg]], objective: Any = train
) -> dict[int, list[float]]:
    study = optuna.create_study()
    fleet.script = script
    study.optimize(objective, n_trials=len(script), executor=fleet)
    # The numbers that torch draws at the end tell whether its generator was restored too.
    return {t.number: t.user_attrs["losses"] + t.user_attrs["noise"] for t in study.trials}


@pytest.fixture(scope="module")
def alone(fleet: Any) -> list[float]:
    return losses_of(fleet, {0: [Leg((0,))]})[0]


def test_twice_alone_gives_the_same_bits_on_any_device(fleet: Any, alone: list[float]) -> None:
    assert losses_of(fleet, {0: [Leg((3,))]})[0] == alone


def test_in_a_flotilla_of_four_gives_the_same_bits(fleet: Any, alone: list[float]) -> None:
    together = losses_of(fleet, {n: [Leg((n,))] for n in range(4)})
    assert together[0] == alone
    assert together[1] != alone  # another trial, another seed


@pytest.mark.parametrize("devices", [(0, 1), (1, 2, 3)])
def test_on_more_devices_gives_the_same_losses(
    fleet: Any, alone: list[float], devices: tuple[int, ...]
) -> None:
    # Batch 10: shards of 5+5, 4+3+3; the last batch is 1+0, 1+0+0.
    assert losses_of(fleet, {0: [Leg(devices)]})[0] == pytest.approx(alone, rel=1e-10)


@pytest.mark.parametrize("stops", [(1,), (3,), (1, 2, 5)])
def test_resumed_on_one_device_continues_bit_for_bit(
    fleet: Any, alone: list[float], stops: tuple[int, ...]
) -> None:
    legs = [Leg((i % 4,), stop) for i, stop in enumerate(stops)]
    assert losses_of(fleet, {0: [*legs, Leg((3,))]})[0] == alone


def test_resumed_on_three_devices_continues_bit_for_bit(fleet: Any) -> None:
    whole = losses_of(fleet, {0: [Leg((0, 1, 2))]})[0]
    assert losses_of(fleet, {0: [Leg((0, 1, 2), 2), Leg((1, 2, 3))]})[0] == whole


def test_moved_between_one_two_and_three_devices(fleet: Any, alone: list[float]) -> None:
    legs = [Leg((0,), 1), Leg((1, 2), 2), Leg((1, 2, 3), 4), Leg((0,))]
    assert losses_of(fleet, {0: legs})[0] == pytest.approx(alone, rel=1e-10)


def train_by_chance(trial: Any) -> float:
    """A layer of its own is skipped at random, as torch's generator of the CPU says."""
    model = small_model()
    skipped = nn.BatchNorm2d(1).double()
    model, skipped = trial.prepare(model, skipped)
    optimizer = torch.optim.SGD([*model.parameters(), *skipped.parameters()], lr=0.05)
    losses = []
    for _ in trial.epochs(2):
        for images, labels in trial.batches("train", batch_size=10):
            inputs = images if torch.rand(()) < 0.5 else skipped(images)
            loss = F.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(trial.mean(loss.item(), weight=trial.shard_size))
    trial.set_user_attr("losses", losses)
    trial.set_user_attr("noise", [])
    return losses[-1]


def test_what_is_decided_by_a_random_number_is_alike_on_all_ranks(fleet: Any) -> None:
    one, two = (
        losses_of(fleet, {0: [Leg(devices)]}, train_by_chance)[0] for devices in ((0,), (1, 2))
    )
    assert two == pytest.approx(one, rel=1e-10)


def train_and_die(trial: Any, *, flag: Path) -> float:
    """Train, but the first time over the process is killed in the fourth epoch."""
    epochs = trial.epochs

    def watched(num_epochs: int) -> Any:
        for epoch in epochs(num_epochs):
            if epoch == 3 and not flag.exists():
                flag.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield epoch

    trial.epochs = watched
    return train(trial)


def test_a_killed_trial_resumes_from_its_checkpoint_bit_for_bit(
    alone: list[float], tmp_path: Path
) -> None:
    study = optuna.create_study()
    objective = functools.partial(train_and_die, flag=tmp_path / "died")
    with fleet_of(devices=1, checkpoints=Checkpoints(interval_s=0.0)) as fleet:
        study.optimize(objective, n_trials=1, executor=fleet)
    assert (tmp_path / "died").exists()
    assert study.trials[0].user_attrs["losses"] + study.trials[0].user_attrs["noise"] == alone
    flights = flights_of(study)[0]
    assert [flight["ending"] for flight in flights] == ["lost", "returned"]


def two_loops(trial: Any) -> float:
    """Two models, one after the other, each with a loop of its own."""
    values = []
    for part in range(2):
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        model, optimizer = trial.prepare(model, optimizer)
        losses = trial.state.setdefault(f"losses {part}", [])
        for _ in trial.epochs(3):
            for images, labels in trial.batches("train", batch_size=10):
                loss = F.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        values.append(losses)
    trial.set_user_attr("losses", values)
    return 0.0


@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_a_trial_with_two_loops_resumes_in_the_one_it_was_in(fleet: Any, stop: int) -> None:
    def run(legs: Sequence[Leg]) -> Any:
        study = optuna.create_study()
        fleet.script = {0: legs}
        study.optimize(two_loops, n_trials=1, executor=fleet)
        return study.trials[0].user_attrs["losses"]

    assert run([Leg((0,), stop), Leg((1,))]) == run([Leg((0,))])


def compiles(trial: Any) -> float:
    """Compiles a function for a size of its own; whether for any size goes into an attribute."""
    for_any: list[bool] = []

    def noting(graph: Any, inputs: list[Any]) -> Any:
        for_any.append(any(isinstance(value, torch.SymInt) for value in inputs))
        return graph.forward

    torch.compile(torch.nn.Sequential(torch.nn.Identity(), torch.nn.Tanh()), backend=noting)(
        torch.ones(trial.number + 2)
    )
    trial.set_user_attr("for_any", for_any)
    return 0.0


def test_trials_compile_as_if_they_were_the_first_of_their_process(fleet: Any) -> None:
    """Else for any size after another one, and from torch's limit on not at all."""
    fleet.script = {number: [Leg((0,))] for number in range(3)}
    study = optuna.create_study()
    study.optimize(compiles, n_trials=3, executor=fleet)
    assert [trial.user_attrs["for_any"] for trial in study.trials] == [[False]] * 3
