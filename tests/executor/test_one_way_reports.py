"""A report is sent and not waited for: what becomes of it is known all the same."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from optuna_fleet import TrialError
from optuna_fleet.trainer.session import DriverGoneError
from tests.executor.test_ranks import ON_THREE, own_share, trained
from tests.executor.test_unwinding import session_of


class Picky(optuna.storages.InMemoryStorage):
    """Refuses one value."""

    def set_trial_intermediate_value(self, trial_id: int, step: int, value: float) -> None:
        if value == 13:
            raise ValueError("13 is not stored")
        super().set_trial_intermediate_value(trial_id, step, value)


class OwnError(Exception):
    """The objective's own."""


def reports_13(trial: Any, *, then: str) -> float:
    trial.report(13, 0)
    if then == "goes on":
        with pytest.raises(ValueError, match="13 is not stored"):
            trial.should_prune()
        trial.report(14, 1)
        assert not trial.should_prune()
    elif then == "asks":
        trial.should_prune()
    elif then == "is pruned":
        raise optuna.TrialPruned
    elif then == "raises":
        raise OwnError
    return 1.0


@pytest.mark.parametrize("then", ["asks", "returns", "is pruned", "raises"])
def test_an_error_of_the_storage_fails_the_trial_whatever_it_does_next(
    fleet: Any, then: str
) -> None:
    study = optuna.create_study(storage=Picky())
    kind, said = (OwnError, None) if then == "raises" else (ValueError, "13 is not stored")
    with pytest.raises(kind, match=said):
        study.optimize(functools.partial(reports_13, then=then), n_trials=1, executor=fleet)
    (trial,) = study.trials
    assert (trial.state, trial.value) == (TrialState.FAIL, None)


def test_an_error_of_the_storage_is_raised_once(fleet: Any) -> None:
    study = optuna.create_study(storage=Picky())
    study.optimize(functools.partial(reports_13, then="goes on"), n_trials=1, executor=fleet)
    assert study.trials[0].state is TrialState.COMPLETE
    assert study.trials[0].intermediate_values == {1: 14}


def reports_13_on_all(trial: Any) -> float:
    for epoch, _ in trained(trial, epochs=1):
        trial.report(13, epoch)
    return 0.0


def reports_its_share_last(trial: Any) -> float:
    for epoch, model in trained(trial, epochs=1):
        trial.report(own_share(trial, model), epoch)
    return 0.0


@pytest.mark.parametrize(
    ("objective", "kind", "said"),
    [
        (reports_13_on_all, ValueError, "13 is not stored"),
        (reports_its_share_last, TrialError, r"trial.report\(\) is .* but .* on rank [12]"),
    ],
)
def test_errors_of_several_ranks_count_at_their_end_too(
    fleet: Any, objective: Any, kind: type[Exception], said: str
) -> None:
    study = optuna.create_study(storage=Picky())
    fleet.script = {0: ON_THREE}
    with pytest.raises(kind, match=said):
        study.optimize(objective, n_trials=1, executor=fleet)
    assert study.trials[0].state is TrialState.FAIL
    assert study.trials[0].intermediate_values == {}


def reports_much(trial: Any) -> float:
    for step in range(250):
        trial.report(float(step), step)
    return 1.0


def test_hundreds_of_reports_in_a_row_are_stored(fleet: Any) -> None:
    study = optuna.create_study()
    fleet.script = {0: ON_THREE}
    study.optimize(reports_much, n_trials=1, executor=fleet)
    assert list(study.trials[0].intermediate_values) == list(range(250))


class Slow(optuna.storages.InMemoryStorage):
    """Takes its time, so that reports queue up."""

    def set_trial_intermediate_value(self, *given: Any) -> None:
        time.sleep(0.005)
        super().set_trial_intermediate_value(*given)


def dies_after_a_report(trial: Any, *, folder: Path, who: Callable[[], int]) -> float:
    died = folder / str(trial.number)
    if died.exists():
        trial.report(2.0, 0)
        return 2.0
    died.touch()
    for step in range(50):
        trial.report(1.0, step)
    os.kill(who(), signal.SIGKILL)
    while True:
        signal.pause()  # until its agent's death has reached it too


@pytest.mark.parametrize("who", [os.getpid, os.getppid], ids=["trainer", "agent"])
def test_a_kill_right_after_a_report_does_not_lose_it(
    fleet: Any, tmp_path: Path, who: Callable[[], int]
) -> None:
    study = optuna.create_study(storage=Slow())
    objective = functools.partial(dies_after_a_report, folder=tmp_path, who=who)
    study.optimize(objective, n_trials=1, executor=fleet)
    assert study.trials[0].intermediate_values == dict.fromkeys(range(50), 1.0)
    assert study.trials[0].value == 2.0


# -- without processes ----------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_a_report_does_not_wait_but_does_not_run_away_either(rank: int) -> None:
    session, channel = session_of(rank)  # to wait for the driver is to find that it has quit
    for step in range(99):
        session.report(0.5, step)
    assert [message.step for message in channel.sent] == list(range(99))
    with pytest.raises(DriverGoneError):
        session.report(0.5, 99)
    assert channel.sent[-1].is_awaited
