"""What becomes of trials in stages when something, or somebody, breaks them."""

from __future__ import annotations

import functools
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
import torch.nn.functional as F
from optuna.trial import FrozenTrial, TrialState
from torch import nn

from optuna_fleet import Checkpoints, FleetExecutor, Limits, TrialError
from tests.fleets import Leg, run, small_pipeline
from tests.waiting import until

ON_FOUR = Leg((0, 1, 2, 3))
FLUSHED = {"in_flight": 4, "virtual_workers": 1}
SHARED = {"in_flight": 4, "virtual_workers": 2}
SERVERS = {"in_flight": 3, "virtual_workers": 2, "clock_distance": 0}
ALONE = {"in_flight": 3, "virtual_workers": 1, "clock_distance": 0}


class Trap(nn.Module):
    """Does something in the first training pass of which `is_time` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.spring: Callable[[], object] = lambda: None
        self.is_time: Callable[[], bool] = lambda: False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.is_time():
            self.spring()
        return x


def model_and_trap() -> tuple[nn.Sequential, Trap]:
    trap = Trap()
    layers = nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 8), trap, nn.Linear(8, 3)
    return nn.Sequential(*layers).double(), trap


def trains(
    trial: Any,
    *,
    options: dict[str, Any],
    spring: Callable[[], object] = lambda: None,
    min_devices: int = 1,
) -> float:
    """Three epochs of five batches; the trap springs in the third batch of the second.

    That is in the last pipeline, and when the driver knows of a checkpoint.
    """
    model, trap = model_and_trap()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    pipeline = trial.pipeline(
        model, optimizer, F.cross_entropy, min_devices=min_devices, **options
    )

    def is_time() -> bool:
        last = pipeline.num_virtual_workers - 1
        return pipeline.num_batches == 8 and pipeline._own.address.worker == last

    trap.spring, trap.is_time = spring, is_time
    losses = trial.state.setdefault("losses", [])
    for epoch in trial.epochs(3):
        for step, (images, labels) in enumerate(trial.batches("train", batch_size=10)):
            if (epoch, step) == (1, 2):
                trial._training.saver.finish()
                trial.should_prune()  # answered after all that was said before
            if (loss := pipeline.step(images, labels)) is not None:
                losses.append(loss.item())
        losses += [loss.item() for loss in pipeline.flush()]
        trial.report(pipeline.evaluate(trial.batches("val", batch_size=8)), epoch)
    trial.set_user_attr("losses", losses)
    return float(losses[-1])


# -- processes that die, stop, or are interrupted -------------------------------------------------


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A fleet that notices soon; with patience enough for a loaded machine."""
    due = Checkpoints(tmp_path_factory.mktemp("checkpoints"), interval_s=0)
    limits = Limits(hang_s=4.0)
    with FleetExecutor(small_pipeline(), devices=5, limits=limits, checkpoints=due) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def undisturbed(watched: Any) -> FrozenTrial:
    study = optuna.create_study()
    objective = functools.partial(trains, options=SERVERS, min_devices=4)
    study.optimize(objective, n_trials=1, executor=watched)
    return study.trials[0]


def is_disturbed(trial: Any, *, folder: Path, how: signal.Signals, driver: int) -> float:
    """The second trial, on a device of its own, ends when the first has come to its end."""

    def disturb() -> None:
        if (folder / "disturbed").exists():
            return
        (folder / "disturbed").touch()
        os.kill(driver if how is signal.SIGINT else os.getpid(), how)
        threading.Event().wait()

    if trial.number == 1:
        until((folder / "over").exists)
        return 0.0
    last = trains(trial, options=SERVERS, spring=disturb, min_devices=4)
    (folder / "over").touch()
    return last


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGINT])
def test_a_trial_that_loses_a_stage_goes_on_from_its_last_checkpoint_and_others_go_on(
    watched: Any,
    undisturbed: FrozenTrial,
    tmp_path: Path,
    how: signal.Signals,
    log: Any,
) -> None:
    objective = functools.partial(is_disturbed, folder=tmp_path, how=how, driver=os.getpid())
    study = optuna.create_study()
    if how is signal.SIGINT:
        with pytest.raises(KeyboardInterrupt):
            study.optimize(objective, n_trials=2, executor=watched)
        assert [trial.state for trial in study.trials] == [TrialState.RUNNING] * 2
    study.optimize(objective, n_trials=2, executor=watched)
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 2
    if how is signal.SIGSTOP:
        assert "it made no progress for 4 s" in log.getvalue()
        assert "stopped by a signal" in log.getvalue()
    assert study.trials[0].user_attrs == undisturbed.user_attrs
    assert study.trials[0].intermediate_values == undisturbed.intermediate_values


# -- errors, and ranks that go different ways -----------------------------------------------------


class OwnError(Exception):
    pass


def fail() -> None:
    raise OwnError("too late")


@pytest.mark.parametrize("options", [SHARED, SERVERS])
def test_an_error_says_where_it_came_about(fleet: Any, options: dict[str, Any]) -> None:
    told = r"stage \d of virtual worker 1, rank \d: layers \d to \d"
    objective = functools.partial(trains, options=options, spring=fail)
    with pytest.raises(OwnError, match=rf"too late \(in {told}\)") as caught:
        run(fleet, objective, ON_FOUR)
    assert "on device" in "".join(traceback.format_exception(caught.value))


def prune() -> None:
    raise optuna.TrialPruned


def test_layers_may_prune(fleet: Any) -> None:
    pruned = run(fleet, functools.partial(trains, options=FLUSHED, spring=prune), ON_FOUR)
    assert pruned.state is TrialState.PRUNED
    assert [*pruned.intermediate_values] == [0]


class FailsInPlace(torch.optim.SGD):
    """On one rank, when its parameters have come to their places."""

    fails = False

    def load_state_dict(self, state: Any) -> None:
        if self.fails:
            fail()
        super().load_state_dict(state)


def fails_in_place(trial: Any, *, options: dict[str, Any]) -> float:
    model, _ = model_and_trap()
    optimizer = FailsInPlace(model.parameters(), lr=0.05)
    optimizer.fails = trial.rank == 1
    pipeline = trial.pipeline(model, optimizer, F.cross_entropy, **options)
    for images, labels in trial.batches("train", batch_size=10):
        pipeline.step(images, labels)
    return 0.0


def tells_its_process(trial: Any) -> float:
    trial.set_user_attr("processes", trial.sum(os.getpid()))
    return 0.0


def test_what_fails_when_it_is_put_in_place_lets_go_of_the_others(fleet: Any) -> None:
    """Who does not let others go is ended, and another process takes its place."""
    before = run(fleet, tells_its_process, Leg((0, 1)))
    with pytest.raises(OwnError, match="too late"):
        run(fleet, functools.partial(fails_in_place, options=FLUSHED), Leg((0, 1)))
    after = run(fleet, tells_its_process, Leg((0, 1)))
    assert after.user_attrs == before.user_attrs


def goes_its_own_way(trial: Any, *, options: dict[str, Any], rank: int | None, how: str) -> float:
    """A rank, or all, leave the loop in the second epoch, in the third of five steps."""
    model, _ = model_and_trap()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    pipeline = trial.pipeline(model, optimizer, F.cross_entropy, **options)
    for epoch in trial.epochs(3):
        for step, (images, labels) in enumerate(trial.batches("train", batch_size=10)):
            if (epoch, step) == (1, 2) and rank in (None, trial.rank):
                if how == "returns":
                    return 0.0
                if how == "is pruned":
                    raise optuna.TrialPruned
                break
            pipeline.step(images, labels)
        trial.report(pipeline.evaluate(trial.batches("val", batch_size=8)), epoch)
    return 0.0


@pytest.mark.parametrize(
    ("options", "rank", "how", "said"),
    [
        (FLUSHED, 3, "breaks", ""),
        (SHARED, 2, "breaks", ""),
        (SERVERS, 2, "is pruned", "was pruned"),
        (ALONE, 0, "returns", "returned"),
    ],
)
def test_a_rank_that_leaves_the_others_alone_is_told_of(
    fleet: Any, options: dict[str, Any], rank: int, how: str, said: str
) -> None:
    leg = Leg((0, 1)) if options is ALONE else ON_FOUR
    objective = functools.partial(goes_its_own_way, options=options, rank=rank, how=how)
    with pytest.raises(TrialError, match=rf"went different ways: .*rank {rank} {said}"):
        run(fleet, objective, leg)
