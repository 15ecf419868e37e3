"""What happened in a call can be read afterwards, and leads to the same decisions again."""

from __future__ import annotations

import functools
import logging
import traceback
from typing import Any

import optuna
import pytest

from optuna_fleet import FleetExecutor
from optuna_fleet.events import Event, Instruction
from optuna_fleet.executor.deciding.controller import Controller
from tests.fleets import small_pipeline, train


def two_trials(**options: Any) -> None:
    study = optuna.create_study()
    with FleetExecutor(
        small_pipeline(), devices=2, device_type="cpu", preflight=False, **options
    ) as fleet:
        study.optimize(functools.partial(train, epochs=12), n_trials=2, executor=fleet)


def test_a_call_that_breaks_off_says_what_happened_last(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Controller.handle

    def failing(self: Controller, *events: Event) -> list[Instruction]:
        if any(type(event).__name__ == "EpochEnded" for event in events):
            raise KeyError("a fault of ours")
        return handle(self, *events)

    monkeypatch.setattr(Controller, "handle", failing)
    with pytest.raises(KeyError, match="a fault of ours") as raised:
        two_trials()
    (note,) = raised.value.__notes__
    assert note.startswith("What happened last in the fleet:\n")
    happened = [line.split(" s  ")[1] for line in note.splitlines()[1:]]
    assert happened[-1].startswith("EpochEnded(run_id=")
    assert any(line.startswith("Launch(run_id=0, number=0, devices=(") for line in happened)
    if hasattr(raised.value, "add_note"):  # Python 3.11 prints it
        assert note.splitlines()[-1] in "".join(traceback.format_exception(raised.value))


def test_all_is_told_at_the_level_debug_and_leads_to_the_same_decisions_again(
    monkeypatch: pytest.MonkeyPatch, log: Any
) -> None:
    optuna.logging.set_verbosity(logging.DEBUG)
    made: list[Controller] = []
    happened: list[tuple[tuple[Event, ...], list[Instruction]]] = []
    handle = Controller.handle

    def noting(self: Controller, *events: Event) -> list[Instruction]:
        made[:] = [self]
        happened.append((events, handle(self, *events)))
        return happened[-1][1]

    with monkeypatch.context() as patched:
        patched.setattr(Controller, "handle", noting)
        two_trials(policy="elastic")
    (real,) = made
    again = Controller(real._state.policy)
    assert [again.handle(*events) for events, _ in happened] == [said for _, said in happened]
    assert again.finished
    lines = log.getvalue().splitlines()
    launch = next(n for n, line in enumerate(lines) if line.startswith("Launch(run_id=0"))
    end = next(n for n, line in enumerate(lines) if line.startswith("FinishTrial(number="))
    assert launch < end
