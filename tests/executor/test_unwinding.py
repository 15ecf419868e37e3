"""Objectives that catch everything: a trial that is told to leave its devices leaves them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import optuna
import pytest

from optuna_fleet.sampler_bridge.records import flights_of
from optuna_fleet.trainer.link import Inbox
from optuna_fleet.trainer.session import DriverGoneError, Session
from optuna_fleet.wire.node_messages import Quit
from tests.executor.orders import run_trial
from tests.fleets import Leg, train


def says_so_from_one_rank(trial: Any) -> float:
    if trial.rank == 0:
        trial.set_user_attr("failed", True)
    return -1.0


def starts_over(trial: Any) -> float:
    return train(trial)


class CatchesAll:
    """An objective with a bare ``except:`` around its training."""

    def __init__(self, then: Callable[[Any], float]) -> None:
        self.then = then

    def __call__(self, trial: Any) -> float:
        try:
            return train(trial)
        except:  # noqa: E722 - what this is about
            return self.then(trial)


@pytest.mark.parametrize("then", [says_so_from_one_rank, starts_over])
def test_a_trial_that_catches_everything_moves(fleet: Any, then: Callable[[Any], float]) -> None:
    studies = []
    for legs in ([Leg((0,))], [Leg((0,), 1), Leg((1, 2), 3), Leg((3,))]):
        studies.append(optuna.create_study())
        fleet.script = {0: legs}
        studies[-1].optimize(CatchesAll(then), n_trials=1, executor=fleet)
    moved = studies[1].trials[0]
    flights = flights_of(studies[1])[0]
    assert [flight["ending"] for flight in flights] == ["yielded", "yielded", "returned"]
    assert len(moved.user_attrs["losses"]) == 6 * 5
    assert moved.value == pytest.approx(studies[0].trials[0].value)
    assert list(moved.intermediate_values) == list(range(6))
    assert set(moved.user_attrs) == {"losses", "noise"}


class QuittingDriver:
    """A channel on which the driver ends the sweep instead of answering."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self._is_asked = threading.Event()

    def send(self, message: Any) -> None:
        self.sent.append(message)
        if message.is_awaited:
            self._is_asked.set()

    def receive(self) -> Any:
        self._is_asked.wait()
        return Quit()


def session_of(rank: int) -> tuple[Session, QuittingDriver]:
    channel: Any = QuittingDriver()
    return Session(Inbox(channel), run_trial(rank=rank, world_size=2)), channel


def test_nothing_is_asked_of_a_driver_that_is_gone() -> None:
    session, channel = session_of(rank=0)
    for _ in range(2):
        with pytest.raises(DriverGoneError):
            session.call("trial", "should_prune")
    assert len(channel.sent) == 1  # a second call would wait for ever
