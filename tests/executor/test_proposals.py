"""When further trials are asked for, and how many may still come, as the plans are told."""

from __future__ import annotations

from typing import Any

import optuna
import pytest
from optuna.samplers import GridSampler

from optuna_fleet.events import ProposalDelayed, ProposalsExhausted, TrialProposed
from optuna_fleet.sampler_bridge.loop import Loop
from optuna_fleet.sampler_bridge.patience import Patience
from optuna_fleet.sampler_bridge.proposals import Proposals


def proposals(n_trials: int | None, timeout: float | None = None, **study: Any) -> Proposals:
    made = optuna.create_study(**study)
    return Proposals(made, n_trials, timeout, Patience(made, 0.0))


def to_come(asked: Proposals) -> int:
    (event,) = asked.next_events()
    assert isinstance(event, TrialProposed)
    return event.num_to_come


def test_n_trials_says_how_many_are_to_come_those_given_back_too() -> None:
    asked = proposals(3)
    assert to_come(asked) == 2
    asked.return_to_queue(0)
    assert [to_come(asked) for _ in range(3)] == [2, 1, 0]
    assert asked.next_events() == [ProposalsExhausted()]


def test_a_timeout_lets_as_many_come_as_have_in_that_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Proposals, "elapsed_s", property(lambda _: 10.0))
    limited, unlimited = proposals(4, 30.0), proposals(None, 30.0)
    assert [to_come(limited) for _ in range(3)] == [2, 2, 1]
    assert [to_come(unlimited) for _ in range(3)] == [2, 4, 6]


def test_that_no_more_trials_may_come_is_told_though_nobody_calls() -> None:
    study = optuna.create_study(sampler=GridSampler({"x": [0, 1]}))
    with loop_of(study) as loop:
        for _ in range(2):
            loop.proposals.next_events()
        assert loop.proposals.next_events() == [ProposalDelayed()]
        loop.proposals.stop()
        assert loop.proposals.next_events(again=True) == [ProposalsExhausted()]


def loop_of(study: optuna.Study) -> Loop:
    return Loop(study, n_trials=None)
