"""G2 for what users write: the losses of `objectives` do not depend on the devices."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import optuna
import pytest
import torch

from optuna_fleet import FleetConfigError, TrialError
from optuna_fleet.sampler_bridge.records import flights_of
from tests.executor import losses, objectives
from tests.executor.parts import OBJECTIVES, usual_pipeline
from tests.fleets import Leg, await_trainers, fleet_of

# What torch says of these, where it runs; all other warnings are errors in trainers too.
pytestmark = [
    pytest.mark.filterwarnings("ignore:reduction. 'mean' divides"),  # the default of KLDivLoss
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # torch.compile
    # What torch 2.4 says of its own torch.compile, and of its own activation checkpointing.
    pytest.mark.filterwarnings("ignore:.*autograd.function.Function.*should not be instantiated"),
    pytest.mark.filterwarnings("ignore:.torch.cpu.amp.autocast.* is deprecated"),
]

# Three first, so that what went wrong there has consequences; then one stays and another joins.
LEGS = {0: [Leg((3,))], 1: [Leg((0, 1, 2), 1), Leg((0, 3))]}
COMPILED_LEGS = {0: [Leg((1,))], 1: [Leg((0, 1), 2), Leg((0,))]}  # each rank compiles for itself


@pytest.fixture(scope="module")
def usual_fleet() -> Iterator[Any]:
    with fleet_of(devices=4, pipeline=usual_pipeline(), policy="equal-split") as fleet:
        await_trainers(fleet, 4)
        yield fleet


def widths(study: Any) -> list[list[int]]:
    """The number of devices of each flight, by trial."""
    return [
        [len(f["devices"]) for f in flights] for _, flights in sorted(flights_of(study).items())
    ]


def found(log: Any) -> list[int]:
    """The trials whose losses were said to be no means."""
    numbers = re.findall(r"Trial (\d+): .*not the mean over the samples", log.getvalue())
    return [int(number) for number in numbers]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_same_on_any_devices(usual_fleet: Any, log: Any, name: str) -> None:
    study = optuna.create_study()
    legs = COMPILED_LEGS if name == "compiled" else LEGS
    usual_fleet.script = dict(legs)
    objective = functools.partial(objectives.run, name=name)
    study.optimize(objective, n_trials=len(legs), executor=usual_fleet)
    assert widths(study) == [[len(leg.devices) for leg in legs[number]] for number in legs]
    alone, *others = (trial.user_attrs["seen"] for trial in study.trials)
    assert len(set(alone)) > len(alone) / 2  # it does train
    tolerance = 0.05 if name == "autocast" else 1e-10  # bfloat16 has three digits
    for seen in others:
        assert seen == pytest.approx(alone, rel=tolerance, nan_ok=True)
    assert "Trial" not in log.getvalue()  # no warning


@pytest.mark.parametrize("loss_of", losses.COUPLED)
def test_a_loss_that_is_no_mean_is_told_of_and_kept_on_one_device(
    usual_fleet: Any, log: Any, loss_of: Any
) -> None:
    study = optuna.create_study()
    data = losses.COUPLED[loss_of]
    objective = functools.partial(losses.trains_long, loss_of=loss_of, data=data)
    study.optimize(objective, n_trials=1, executor=usual_fleet)
    assert found(log) == [0]
    assert "trial.weighted(" in log.getvalue()
    assert set(*widths(study)) == {1}


@pytest.mark.parametrize("objective", objectives.UNCLEAR)
def test_batches_that_can_not_be_told_apart_are_told_of_and_kept_on_one_device(
    usual_fleet: Any, log: Any, objective: Any
) -> None:
    study = optuna.create_study()
    study.optimize(objective, n_trials=1, executor=usual_fleet)
    assert log.getvalue().count("Trial 0: It can't be told which of several batches") == 1
    assert set(*widths(study)) == {1}


def test_what_is_found_on_several_devices_goes_on_on_one(usual_fleet: Any, log: Any) -> None:
    """From its last checkpoint, without a restart that counts."""
    objective = functools.partial(objectives.fetches_ahead_and_normalises, from_epoch=12)
    study, alone = optuna.create_study(), optuna.create_study()
    study.optimize(objective, n_trials=1, executor=usual_fleet)
    assert log.getvalue().count("goes on from its last checkpoint, on one device") == 1
    assert widths(study)[0][-2:] == [4, 1]
    usual_fleet.script = {0: [Leg((0,))]}
    alone.optimize(objective, n_trials=1, executor=usual_fleet)
    expected = alone.trials[0].user_attrs["seen"]
    assert study.trials[0].user_attrs["seen"] == pytest.approx(expected, rel=1e-10)


def test_sums_within_an_evaluation_are_of_all_ranks(usual_fleet: Any, log: Any) -> None:
    """Its last batch is two samples: a rank without one would take no part in its sum."""
    study, alone = optuna.create_study(), optuna.create_study()
    study.optimize(objectives.sums_in_each_step, n_trials=1, executor=usual_fleet)
    assert log.getvalue().count("goes on from its last checkpoint, on 2 devices at most") == 1
    flown = widths(study)[0]
    # Before torch 2.7 trainers start anew after that: fewer are there at first.
    assert set(flown[flown.index(4) + 1 :]) <= {1, 2}
    usual_fleet.script = {0: [Leg((0,))]}
    alone.optimize(objectives.sums_in_each_step, n_trials=1, executor=usual_fleet)
    expected = alone.trials[0].user_attrs["seen"]
    assert study.trials[0].user_attrs["seen"] == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize(
    ("bounds", "first", "last"),
    [
        ({"max_devices": 2}, 1, 2),
        ({"min_devices": 3}, 1, 4),
        # Not on one again and again.
        ({"min_devices": 3, "batch_size": 1, "epochs": 4}, 1, 3),
    ],
)
def test_a_trial_says_how_many_devices_it_wants(
    usual_fleet: Any, bounds: dict[str, int], first: int, last: int
) -> None:
    study = optuna.create_study()
    objective = functools.partial(objectives.bounded, **bounds)
    study.optimize(objective, n_trials=1, executor=usual_fleet)
    (flown,) = widths(study)
    assert (flown[0], flown[-1]) == (first, last)
    assert all(
        bounds.get("min_devices", 1) <= m <= bounds.get("max_devices", 4) for m in flown[1:]
    )


def test_a_trial_that_needs_fewer_devices_than_it_may_have_fails(usual_fleet: Any) -> None:
    """Else it would be begun again and again."""
    study = optuna.create_study()
    with pytest.raises(TrialError, match="on 2 devices at most, but its `min_devices` is 3"):
        study.optimize(objectives.bounded_and_sums_in_each_step, n_trials=1, executor=usual_fleet)
    assert study.trials[0].state is optuna.trial.TrialState.FAIL


@pytest.mark.parametrize(
    ("bounds", "complaint"),
    [
        ({"min_devices": 5}, "`min_devices` is 5, but the fleet has 4: it must not be more"),
        ({"min_devices": 3, "max_devices": 2}, "`min_devices` is 3, but `max_devices` is 2"),
        ({"max_devices": 0}, "`max_devices` is 0, but must be a whole number >= 1, or None"),
    ],
)
def test_bounds_that_can_not_be_met_are_refused(
    usual_fleet: Any, bounds: dict[str, int], complaint: str
) -> None:
    objective = functools.partial(objectives.bounded, **bounds)
    with pytest.raises(FleetConfigError, match=complaint):
        optuna.create_study().optimize(objective, n_trials=1, executor=usual_fleet)


def test_a_loss_that_is_a_mean_is_given_all_devices(usual_fleet: Any, log: Any) -> None:
    study = optuna.create_study()
    objective = functools.partial(losses.trains_long, loss_of=losses.cross_entropy)
    study.optimize(objective, n_trials=1, executor=usual_fleet)
    assert found(log) == []
    assert widths(study)[0][-1] == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_losses_of_torch_are_means(usual_fleet: Any, log: Any, dtype: torch.dtype) -> None:
    study = optuna.create_study()
    objective = functools.partial(losses.trains_with_one, dtype=dtype)
    study.optimize(objective, n_trials=len(losses.LOSSES), executor=usual_fleet)
    assert [[*losses.LOSSES][number] for number in found(log)] == []
