"""Trials on devices of two types at once, beside others: real processes on this machine."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch.nn.functional as F
from torch import nn

from optuna_fleet import FleetConfigError, LocalCluster
from optuna_fleet.trainer.gradients import collectives
from tests.executor.test_device_faults import own_device
from tests.fleets import fleet_of, train
from tests.virtual_workers.test_pipelines import BATCH, momentum, result, trains

LINEAR = 3 * 8 * 36 * 37  # bytes of a layer's weights, gradients and momenta
OPTIONS = {"in_flight": 4}


def layers() -> nn.Sequential:
    """Six that are equally large, in pairs; what they keep of a batch is little beside that."""
    pairs = [nn.Sequential(nn.Linear(36, 36), nn.Tanh()) for _ in range(5)]
    return nn.Sequential(nn.Flatten(), *pairs, nn.Linear(36, 3)).double()


@pytest.fixture(scope="module")
def fleet() -> Iterator[Any]:
    """Two devices of either type."""
    cluster = LocalCluster(nodes=2, kinds=("fast", "slow"))
    with fleet_of(devices=2, device_type="cpu", cluster=cluster) as fleet:
        yield fleet


def in_stages(trial: Any, **more: Any) -> float:
    """Notes the types of the devices that it ends on."""
    value = trains(trial, options={**OPTIONS, **more}, build=layers)
    trial.set_user_attr("types", collectives.gather(own_device().kind))
    return value


def is_pruned(trial: Any, memory_bytes: float) -> float:
    model = layers()
    optimizer = momentum(model.parameters(), lr=0.05)
    pipeline = trial.pipeline(
        model, optimizer, F.cross_entropy, memory_bytes=memory_bytes, **OPTIONS
    )
    for epoch in trial.epochs(3):
        for images, labels in trial.batches("train", batch_size=BATCH):
            pipeline.step(images, labels)
        trial.report(1.0, epoch)
        trial.set_user_attr("stages", pipeline.num_stages)
        if trial.should_prune():
            raise optuna.TrialPruned
    return 0.0


class PrunesOne(optuna.pruners.BasePruner):
    """Prunes trial 3."""

    def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
        return trial.number == 3


def searched(trial: Any) -> float:
    """Large ones, which need three devices, and small ones."""
    if trial.number == 0:
        return in_stages(trial, memory_bytes=2.5 * LINEAR)
    if trial.number == 3:
        return is_pruned(trial, 2.5 * LINEAR)
    return train(trial, epochs=2)


@pytest.fixture(scope="module")
def alone(fleet: Any) -> Any:
    study = optuna.create_study()
    study.optimize(functools.partial(in_stages, max_devices=1), n_trials=1, executor=fleet)
    return result(study.trials[0])


def test_a_search_in_which_trials_need_devices_of_two_types(fleet: Any, alone: Any) -> None:
    study = optuna.create_study(pruner=PrunesOne())
    study.optimize(searched, n_trials=4, executor=fleet)
    assert [trial.state.name for trial in study.trials] == [*["COMPLETE"] * 3, "PRUNED"]
    large = study.trials[0]
    assert set(large.user_attrs["types"]) == {"fast", "slow"}
    assert study.trials[3].user_attrs["stages"] >= 3
    assert result(large) == alone


def of_unlike_memory(trial: Any) -> float:
    memory = {"fast": 3.5, "slow": 1.5}[own_device().kind]
    return in_stages(trial, memory_bytes=memory * LINEAR)


def test_who_has_tried_a_small_device_gets_larger_ones(fleet: Any) -> None:
    study = optuna.create_study()
    study.optimize(of_unlike_memory, n_trials=4, executor=fleet)  # each device tries one
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 4
    assert all("fast" in trial.user_attrs["types"] for trial in study.trials)


def loses_a_node(trial: Any, *, folder: Path) -> float:
    """The node of its slow devices is killed in its second epoch, once."""

    def lose(epoch: int) -> None:
        was_killed = folder / "was killed"
        if epoch == 1 and own_device().kind == "slow" and not was_killed.exists():
            was_killed.touch()
            os.kill(os.getppid(), signal.SIGKILL)

    value = trains(trial, options={**OPTIONS, "min_devices": 3}, build=layers, at_epoch=lose)
    trial.set_user_attr("types", collectives.gather(own_device().kind))
    return value


def test_a_trial_that_loses_the_devices_of_one_type_goes_on(
    fleet: Any, alone: Any, tmp_path: Path
) -> None:
    study = optuna.create_study()
    study.optimize(functools.partial(loses_a_node, folder=tmp_path), n_trials=1, executor=fleet)
    assert (tmp_path / "was killed").exists()
    assert set(study.trials[0].user_attrs["types"]) == {"fast", "slow"}
    assert result(study.trials[0]) == alone


def test_what_does_not_fit_on_all_of_them_fails_and_says_so(fleet: Any) -> None:
    study = optuna.create_study()
    objective = functools.partial(in_stages, memory_bytes=0.5 * LINEAR)
    with pytest.raises(FleetConfigError, match="do not fit on 4 devices"):
        study.optimize(objective, n_trials=1, executor=fleet)
    needs_five = functools.partial(in_stages, min_devices=5)
    with pytest.raises(FleetConfigError, match="the fleet has 4"):
        study.optimize(needs_five, n_trials=1, executor=fleet)


@pytest.mark.parametrize("kinds", ["ab", ("a",), ("a", 1)])
def test_kinds_that_are_no_names_of_nodes_are_refused(kinds: Any) -> None:
    with pytest.raises(FleetConfigError, match="as many names as there are nodes: 2"):
        LocalCluster(nodes=2, kinds=kinds)
