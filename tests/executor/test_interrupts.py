"""Ctrl-C twice, and what Optuna keeps for each thread."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from typing import Any
from unittest import mock

import optuna
import pytest
from optuna.trial import TrialState

from optuna_fleet import FleetExecutor
from optuna_fleet.executor.call.driver import Interrupts
from optuna_fleet.executor.fleet.runtime import Runtime
from optuna_fleet.sampler_bridge.ledger import Ledger
from optuna_fleet.wire.inbox import Inbox
from tests.behaviour.test_studies import interrupt_driver, states, unit

COMPLETE, FAIL, RUNNING = TrialState.COMPLETE, TrialState.FAIL, TrialState.RUNNING


@pytest.mark.parametrize(
    ("owner", "method", "left"), [(Ledger, "abandon", RUNNING), (Runtime, "reset", FAIL)]
)
def test_a_second_control_c_leaves_at_once(owner: type, method: str, left: TrialState) -> None:
    objective = functools.partial(interrupt_driver, driver=os.getpid(), num_trials=2)
    study, after = optuna.create_study(), optuna.create_study()
    with FleetExecutor(devices=2) as executor:
        with (
            mock.patch.object(owner, method, side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            study.optimize(objective, n_trials=2, executor=executor)
        after.optimize(unit, n_trials=4, executor=executor)  # no device is still busy with that
    assert states(study) == 2 * [left]
    assert states(after) == 4 * [COMPLETE]


def test_a_second_control_c_that_comes_as_a_message_is_read_leaves_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first one is no reason to leave while devices are freed, the second one is."""
    reset, ends = Runtime.reset, []

    def reset_(self: Runtime, *arguments: Any) -> bool:
        def read() -> None:
            if self.inbox.is_at_work:
                signal.raise_signal(signal.SIGINT)
            else:
                self.inbox.call_later(0.0, read)

        self.inbox.put(None)  # as the first one does
        self.inbox.call_later(0.2, read)
        monkeypatch.setattr(Runtime, "kill", lambda self, device: None)  # so it would wait
        try:
            ends.append(began := time.monotonic())
            return reset(self, *arguments)
        except KeyboardInterrupt:
            ends.append(time.monotonic() - began)
            raise

    monkeypatch.setattr(Runtime, "reset", reset_)
    objective = functools.partial(interrupt_driver, driver=os.getpid(), num_trials=1)
    with FleetExecutor(devices=1) as executor, pytest.raises(KeyboardInterrupt):
        optuna.create_study().optimize(objective, n_trials=1, executor=executor)
    assert ends[1:]
    assert ends[1] >= 0.2


def test_a_slow_sampler_on_a_database_that_only_its_thread_sees(
    fleet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optuna_fleet.executor.call.call_handler._SLOW_S", 0.0)
    study = optuna.create_study(storage="sqlite:///:memory:")
    study.optimize(unit, n_trials=6, executor=fleet)
    assert states(study) == 6 * [COMPLETE]


def test_no_message_is_lost_by_a_control_c_that_comes_as_it_is_read() -> None:
    with contextlib.closing(Inbox()) as inbox, (interrupts := Interrupts(inbox)):

        def read() -> None:
            if not inbox.is_at_work:  # it is the turn of the thread that stands in
                inbox.call_later(0.0, read)
                return
            signal.raise_signal(signal.SIGINT)
            inbox.put("a message")

        inbox.call_later(0.0, read)
        assert [inbox.get(), inbox.get()] == [None, "a message"]
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
