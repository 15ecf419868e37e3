"""What the controller is told of a trial's data and rate."""

from __future__ import annotations

from typing import Any

import torch

from optuna_fleet.events import DataRequested, RateMeasured
from tests.fleets import Leg, evaluate, num_wrong, run, small_model, train_epoch


def prepared(trial: Any) -> Any:
    model = small_model()
    return trial.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))


def evaluates_first(trial: Any) -> float:
    model, optimizer = prepared(trial)
    evaluate(trial, model, num_wrong)
    for _ in trial.epochs(2):
        train_epoch(trial, model, optimizer, [], batch_size=10)
    return 0.0


def test_a_trial_that_evaluates_first_is_known_by_its_training(fleet: Any) -> None:
    run(fleet, evaluates_first, Leg((0, 1, 2)))
    models = [event.model for event in fleet.events if isinstance(event, DataRequested)]
    assert [(model.samples_per_epoch, model.resumable) for model in models] == [
        (20, False),
        (41, True),
    ]


def two_loops(trial: Any) -> float:
    """Loops over as many epochs and periods, after a look at the data."""
    prepared(trial)
    for loop in ([0], trial.epochs(2), trial.steps(8, every=4)):
        for _ in loop:
            for name in ("val", "train", "val"):
                next(iter(trial.batches(name, 8)))
    return 0.0


def test_plans_know_how_long_each_loop_is(fleet: Any) -> None:
    run(fleet, two_loops, Leg((0,)))
    models = [event.model for event in fleet.events if isinstance(event, DataRequested)]
    told = [(model.samples_per_epoch, model.max_epochs) for model in models]
    assert told == [(20, None), (41, None), (41, 2), (4 * 8, 2)]


def never_trains(trial: Any) -> float:
    model, _ = prepared(trial)
    return sum(evaluate(trial, model, num_wrong) for _ in trial.epochs(3))


def test_a_trial_that_never_trains_has_a_rate_all_the_same(fleet: Any) -> None:
    run(fleet, never_trains, Leg((0,), measure=True))
    (measured,) = [event for event in fleet.events if isinstance(event, RateMeasured)]
    assert measured.samples_per_s > 0
