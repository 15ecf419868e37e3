"""`trial.pipeline` with several virtual workers in processes of their own."""

from __future__ import annotations

import functools
import re
from typing import Any

import optuna
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.fleets import Leg, run

BATCH = 10


def with_noise_and_statistics() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(64, 8),
        nn.Tanh(),
        nn.Linear(8, 3),
    ).double()


def momentum(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)


def trains(
    trial: Any,
    *,
    options: dict[str, Any],
    make: Any = momentum,
    build: Any = with_noise_and_statistics,
) -> float:
    model = build()
    pipeline = trial.pipeline(model, make(model.parameters()), F.cross_entropy, **options)
    losses = trial.state.setdefault("losses", [])
    found = 0.0
    for epoch in trial.epochs(4):
        for images, labels in trial.batches("train", batch_size=BATCH):
            if (loss := pipeline.step(images, labels)) is not None:
                losses.append(loss.item())
        losses += [loss.item() for loss in pipeline.flush()]
        found = pipeline.evaluate(trial.batches("val", batch_size=8))
        trial.report(found, epoch)
    trial.set_user_attr("found", found)
    trial.set_user_attr("losses", losses)
    trial.set_user_attr("layout", [pipeline.num_virtual_workers, pipeline.num_stages])
    trial.set_user_attr("in_flight", pipeline.in_flight)
    return found


def result(trial: optuna.trial.FrozenTrial) -> tuple[list[float], float]:
    assert trial.state is optuna.trial.TrialState.COMPLETE
    assert len(trial.user_attrs["losses"]) == 20
    return trial.user_attrs["losses"], trial.user_attrs["found"]


def without_statistics() -> nn.Sequential:
    model = with_noise_and_statistics()
    model[1] = nn.GroupNorm(2, 4).double()
    return model


WAVES = {"in_flight": 3, "clock_distance": 0, "virtual_workers": 2}


def test_they_go_on_from_a_checkpoint_as_if_nothing_had_been(fleet: Any) -> None:
    objective = functools.partial(trains, options=WAVES)
    at_once = run(fleet, objective, Leg((0, 1, 2, 3)))
    moved = run(fleet, objective, Leg((0, 1, 2, 3), until_epoch=1), Leg((2, 1, 3, 0)))
    assert result(moved) == result(at_once)
    assert result(at_once)[0][-1] < result(at_once)[0][0]


def without_noise() -> nn.Sequential:
    model = without_statistics()
    model[3] = nn.Identity()
    return model


def test_one_minibatch_at_a_time_is_sgd_on_whole_batches_whatever_the_layout(fleet: Any) -> None:
    """With momentum and weight decay; the last batch has one sample for two virtual workers."""
    options = {**WAVES, "in_flight": 1}
    objective = functools.partial(trains, options=options, build=without_noise)
    plain = functools.partial(trains, options={"in_flight": 1}, build=without_noise)
    expected = run(fleet, plain, Leg((0,)))
    several = run(fleet, objective, Leg((0, 1, 2, 3)))
    legs = Leg((0, 1, 2, 3), until_epoch=1), Leg((2, 1, 0), until_epoch=3), Leg((3,))
    moved = run(fleet, objective, *legs)
    assert result(several)[0] == pytest.approx(result(expected)[0], rel=1e-10)
    assert result(moved)[0] == pytest.approx(result(expected)[0], rel=1e-10)
    assert moved.user_attrs["found"] == pytest.approx(expected.user_attrs["found"], rel=1e-10)


def test_what_a_clock_distance_alone_gave_is_told(fleet: Any, log: Any) -> None:
    objective = functools.partial(trains, options={"clock_distance": 1})
    trial = run(fleet, objective, Leg((0, 1, 2, 3), until_epoch=2), Leg((0,)))
    said = [line for line in log.getvalue().splitlines() if "takes the layout" in line]
    assert len(said) == 1  # and none for one device
    assert re.search(r"here [1-4] x [1-4]( or [1-4])? \(ED; .* with \d in flight", said[0])
    assert trial.user_attrs["layout"] == [1, 1]
