"""What a trial has trained is freed when it has ended: its trainers serve many others."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import optuna
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.behaviour.harness import Leg, small_model, train_epoch

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
