"""What a trial has trained is freed when it has ended: its trainers serve many others."""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from typing import Any

import optuna
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from optuna_fleet import FleetExecutor
from optuna_fleet.trainer import training
from tests.fleets import Leg, small_model, small_pipeline, train_epoch

_earlier: list[weakref.ref[nn.Module]] = []  # models of this process' trials


def notes_what_is_left(trial: Any, *, is_in_stages: bool) -> float:
    """One epoch; which of the models of earlier trials are still there goes into attributes."""
    is_left = [known() is not None for known in _earlier]
    model: Any = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if is_in_stages:
        pipeline = trial.pipeline(model, optimizer, F.cross_entropy)
    else:
        trial.prepare(model, optimizer)
    for _ in trial.epochs(1):
        if is_in_stages:
            for images, labels in trial.batches("train", batch_size=10):
                pipeline.step(images, labels)
        else:
            train_epoch(trial, model, optimizer, [], batch_size=10)
    _earlier.append(weakref.ref(model))
    trial.set_user_attr("left", is_left)
    return 0.0


@pytest.mark.parametrize("is_in_stages", [False, True])
@pytest.mark.parametrize("devices", [(0,), (0, 1)])
def test_models_of_earlier_trials_are_gone(
    fleet: Any, devices: tuple[int, ...], is_in_stages: bool
) -> None:
    fleet.script = {number: [Leg(devices)] for number in range(3)}
    study = optuna.create_study()
    objective = functools.partial(notes_what_is_left, is_in_stages=is_in_stages)
    study.optimize(objective, n_trials=3, gc_after_trial=True, executor=fleet)
    lefts = [trial.user_attrs["left"] for trial in study.trials]
    assert [len(left) - len(lefts[0]) for left in lefts] == [0, 1, 2]
    assert not any(map(any, lefts))


def test_a_trial_that_can_not_begin_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[weakref.ref[Any]] = []

    def nobody_comes(*_: Any) -> None:
        begun.append(weakref.ref(sys._getframe(1).f_locals["self"]))
        raise RuntimeError("nobody came")

    monkeypatch.setattr(training, "join_group_of", nobody_comes)
    objective = functools.partial(notes_what_is_left, is_in_stages=False)
    inline = FleetExecutor(small_pipeline(), cluster="inline")
    study = optuna.create_study()
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)  # pytest keeps tracebacks that it sees
    study.optimize(objective, n_trials=1, catch=RuntimeError, executor=inline)
    gc.collect()
    assert [refers() for refers in begun] == [None]
