"""How many trials may still come, as the plans are told."""

from __future__ import annotations

from typing import Any

import optuna
import pytest

from optuna_fleet.events import ProposalsExhausted, TrialProposed
from optuna_fleet.sampler_bridge.proposals import Proposals


def proposals(n_trials: int | None, timeout: float | None = None, **study: Any) -> Proposals:
    return Proposals(optuna.create_study(**study), n_trials, timeout)


def to_come(asked: Proposals) -> int:
    (event,) = asked.next_events()
    assert isinstance(event, TrialProposed)
    return event.num_to_come


def test_n_trials_says_how_many_are_to_come() -> None:
    asked = proposals(3)
    assert [to_come(asked) for _ in range(3)] == [2, 1, 0]
    assert asked.next_events() == [ProposalsExhausted()]


def test_a_trial_that_was_given_back_is_to_come() -> None:
    asked = proposals(3)
    assert to_come(asked) == 2
    asked.return_to_queue(0)
    assert to_come(asked) == 2


@pytest.mark.parametrize("storage", [None, "sqlite://"])
def test_all_trials_that_were_given_back_are_asked_for_again(storage: str | None) -> None:
    study = optuna.create_study(storage=storage)
    asked = Proposals(study, 3, None)
    assert [asked.ask() for _ in range(3)] == [0, 1, 2]
    asked.return_to_queue(0)
    asked.return_to_queue(1)
    assert [asked.ask() for _ in range(2)] == [0, 1]
    asked.return_to_queue(1)
    assert study.ask().number == 1  # and by plain Optuna


def test_a_timeout_lets_as_many_come_as_have_in_that_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Proposals, "elapsed_s", property(lambda _: 10.0))
    limited, unlimited = proposals(4, 30.0), proposals(None, 30.0)
    assert [to_come(limited) for _ in range(3)] == [2, 2, 1]
    assert [to_come(unlimited) for _ in range(3)] == [2, 4, 6]


def test_without_a_limit_many_are_to_come_until_the_study_is_stopped() -> None:
    asked = proposals(None)
    assert to_come(asked) > 1000
    asked.stop()
    assert asked.next_events() == [ProposalsExhausted()]
