"""When further trials are asked for, and how many may still come, as the plans are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optuna
import pytest
from optuna.samplers import BaseSampler, BruteForceSampler, GridSampler

from optuna_fleet.events import ProposalDelayed, ProposalsExhausted, TrialProposed
from optuna_fleet.sampler_bridge.ledger import Ledger
from optuna_fleet.sampler_bridge.loop import Loop
from optuna_fleet.sampler_bridge.patience import Patience
from optuna_fleet.sampler_bridge.proposals import Proposals
from optuna_fleet.wire.calls import Call
from optuna_fleet.wire.packing import pack


def proposals(n_trials: int | None, timeout: float | None = None, **study: Any) -> Proposals:
    made = optuna.create_study(**study)
    return Proposals(made, n_trials, timeout, Patience(made, 0.0))


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
    asked = Proposals(study, 3, None, Patience(study, 0.0))
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


class Storage(optuna.storages.InMemoryStorage):
    """Counts how often all trials are looked at."""

    num_looks = 0

    def get_all_trials(self, *args: Any, **kwargs: Any) -> Any:
        self.num_looks += 1
        return super().get_all_trials(*args, **kwargs)


def call(ledger: Ledger, number: int, name: str, *args: Any, target: str = "trial") -> None:
    packed = pack((args, {}))
    one = Call(run_id=0, index=0, rank=0, target=target, name=name, arguments=packed)
    ledger.carry_out(number, one)


def suggests(loop: Loop, number: int) -> None:
    call(loop.ledger, number, "suggest_int", "x", 0, 1)


def ends(loop: Loop, number: int) -> None:
    loop.ledger.settle(number, 0.0, None)


def enqueues(loop: Loop, number: int) -> None:
    call(loop.ledger, number, "enqueue_trial", {"x": 0}, target="study")


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize("news", [ends, enqueues])
@pytest.mark.parametrize(
    "new",
    [
        lambda: GridSampler({"x": [0, 1]}),
        BruteForceSampler,
    ],
)
def test_a_delayed_trial_is_not_thought_of_at_each_call_of_others(
    new: Callable[[], BaseSampler], news: Callable[[Loop, int], None]
) -> None:
    study = optuna.create_study(storage=(storage := Storage()), sampler=new())
    with loop_of(study) as loop:
        for number in range(2):
            assert isinstance(loop.proposals.next_events()[0], TrialProposed)
            suggests(loop, number)
        assert loop.proposals.next_events() == [ProposalDelayed()]
        before = storage.num_looks
        for step in range(100):
            for number in range(2):
                loop.ledger.report(number, 0.0, step)
                call(loop.ledger, number, "set_user_attr", "step", step)
                assert loop.proposals.next_events(again=True) == []
        assert storage.num_looks == before
        news(loop, 0)
        news(loop, 1) if news is ends else None
        assert loop.proposals.next_events(again=True) != []


def test_that_no_more_trials_may_come_is_told_though_nobody_calls() -> None:
    study = optuna.create_study(sampler=GridSampler({"x": [0, 1]}))
    with loop_of(study) as loop:
        for _ in range(2):
            loop.proposals.next_events()
        assert loop.proposals.next_events() == [ProposalDelayed()]
        loop.proposals.stop()
        assert loop.proposals.next_events(again=True) == [ProposalsExhausted()]


def loop_of(study: optuna.Study) -> Loop:
    return Loop(
        study,
        n_trials=None,
        timeout=None,
        catch=(),
        callbacks=None,
        gc_after_trial=False,
        show_progress_bar=False,
    )
