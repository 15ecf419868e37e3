"""Policies of each paradigm, with real processes: the same trials, the same results."""

from __future__ import annotations

from typing import Any

import optuna
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from optuna_fleet import FleetConfigError, FleetExecutor, policies
from optuna_fleet.alloc import ElasticAllocator, FleetAllocator
from optuna_fleet.sampler_bridge.records import flights_of
from optuna_fleet.trainer.gradients.collectives import gather
from tests.fleets import Leg, await_trainers, fleet_of, small_pipeline, train
from tests.layer_clock import Taking, emulated


def short(trial: Any) -> float:
    return train(trial, epochs=2 + trial.number % 2)


def in_stages(trial: Any) -> float:
    """Of layers that do not all fit on one device; the second device is slow."""
    pace = 3 if trial._session.device == 1 else 1
    middle = [nn.Sequential(Taking(0.004 * pace), nn.Linear(36, 36), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(nn.Flatten(), *middle, nn.Linear(36, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipeline = trial.pipeline(model, optimizer, F.cross_entropy, memory_bytes=80_000)
    losses = trial.state.setdefault("losses", [])
    for _ in trial.epochs(2):
        for images, labels in trial.batches("train", batch_size=10):
            losses.append(pipeline.step(images, labels).item())
    own = {"pace": pace, "layers": len(pipeline._own.part)}
    told = sorted(gather(own), key=lambda rank: rank["pace"])
    trial.set_user_attr("layers", [rank["layers"] for rank in told])
    trial.set_user_attr("losses", losses)
    return losses[-1]


def short_or_in_stages(trial: Any) -> float:
    with emulated():
        return in_stages(trial) if trial.number == 1 else short(trial)


def losses_of(policy: Any, objective: Any = short, **options: Any) -> list[Any]:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    pipeline = small_pipeline()
    with FleetExecutor(pipeline, devices=2, device_type="cpu", policy=policy, **options) as fleet:
        study.optimize(objective, n_trials=3, executor=fleet)
    if objective is short_or_in_stages:
        fast, slow = study.trials[1].user_attrs["layers"]
        assert fast > slow
    return [trial.user_attrs["losses"] for trial in study.trials]


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    return losses_of("baseline", short_or_in_stages)


def test_what_the_papers_leave_open_is_an_option() -> None:
    """T_fwd of BFTrainer, delta of FLEET."""
    elastic = policies.Elastic(objective="throughput", forward_looking_s=60.0)
    assert elastic.new_allocator(0) == ElasticAllocator(
        objective="throughput", forward_looking_s=60.0
    )
    for policy in (policies.FleetG(delta=5.0), policies.FleetL(delta=5.0)):
        assert policy.new_allocator(0) == FleetAllocator(delta=5.0)
    with pytest.raises(FleetConfigError, match="delta"):
        policies.FleetG(delta=0.0)


@pytest.mark.parametrize("policy", ["elastic", "mip", "homogeneous"])
def test_a_policy_changes_who_flies_where_and_nothing_else(
    policy: str, expected: list[Any]
) -> None:
    """Nor does a trial beside the others whose stages are on unlike devices."""
    for losses, alike in zip(losses_of(policy, short_or_in_stages), expected, strict=True):
        assert losses == pytest.approx(alike, rel=1e-10)


def test_a_predictor_is_asked_and_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[int] = []

    def predictor(trial: optuna.trial.FrozenTrial) -> float:
        asked.append(trial.number)
        if trial.number == 0:
            raise RuntimeError("no idea")
        return len(trial.intermediate_values) + 1.0

    assert len(losses_of("elastic", predictor=predictor)) == 3
    assert set(asked) == {0, 1, 2}
    assert caplog.text.count("The predictor failed for trial 0") == 1


def test_elastic_moves_a_trial_in_mid_sweep_and_its_losses_stay() -> None:
    study, alone = optuna.create_study(), optuna.create_study()
    with fleet_of(devices=2, policy=policies.Elastic(rescale_s=0.0, time_limit_s=600.0)) as fleet:
        await_trainers(fleet, 2)
        study.optimize(lambda trial: train(trial, epochs=12), n_trials=1, executor=fleet)
        assert fleet.summary.rescales >= 1
        fleet.script = {0: [Leg((0,))]}
        alone.optimize(lambda trial: train(trial, epochs=12), n_trials=1, executor=fleet)
    flights = flights_of(study)[0]
    assert [len(flight["devices"]) for flight in flights][:2] == [1, 2]
    losses, alike = (s.trials[0].user_attrs["losses"] for s in (study, alone))
    assert losses == pytest.approx(alike, rel=1e-10)
