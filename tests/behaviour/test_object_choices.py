"""Choices that are objects: classes, functions, what is equal to a copy of itself."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.samplers import RandomSampler
from torch import nn

from optuna_fleet import FleetExecutor, TrialError
from tests.behaviour.harness import Leg


@dataclass(frozen=True)
class Act:
    name: str


class OfItsOwn:
    """Equal to no other."""


RELU, TANH = Act("relu"), Act("tanh")


@pytest.fixture(autouse=True)
def _optuna_warns_of_objects() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Choices for a categorical distribution")
        warnings.filterwarnings("ignore", ".* contains a value with the type of")
        yield


def pick(trial: Any) -> float:
    """1 for each thing that is as without a fleet."""
    act = trial.suggest_categorical("act", [RELU, TANH])
    again = trial.suggest_categorical("act", choices=[RELU, TANH])
    kind = trial.suggest_categorical("kind", [nn.ReLU, nn.Tanh, torch.relu])
    trial.set_user_attr("act", act.name)
    assert trial.params["kind"] is kind
    return float(sum([act is RELU or act is TANH, again is act, trial.params["act"] is act]))


@pytest.mark.parametrize("cluster", ["local", "inline"])
def test_choices_may_be_objects_of_the_script(fleet: Any, cluster: Any) -> None:
    study = optuna.create_study(sampler=RandomSampler(0))
    executor = fleet if cluster == "local" else FleetExecutor(devices=1, cluster="inline")
    study.enqueue_trial({"act": TANH})
    for _ in range(2):
        study.optimize(pick, n_trials=6, executor=executor)
    assert [trial.value for trial in study.trials] == 12 * [3.0]
    assert [t.params["act"].name for t in study.trials] == [
        t.user_attrs["act"] for t in study.trials
    ]
    assert study.trials[0].params["act"] == TANH
    assert {trial.params["kind"] for trial in study.trials} == {nn.ReLU, nn.Tanh, torch.relu}
    assert executor.evaluate(pick, study.trials[1]) == 3.0


def pick_and_train(trial: Any) -> float:
    value = pick(trial)
    names = trial.state.setdefault("names", [])
    for _ in trial.epochs(3):
        names.append(trial.suggest_categorical("act", [RELU, TANH]).name)
    assert names == 3 * [trial.params["act"].name]
    return value


def test_they_are_the_same_where_a_trial_flies_next(fleet: Any) -> None:
    study = optuna.create_study(sampler=RandomSampler(0))
    fleet.script = {0: [Leg((0, 1), 1), Leg((2,), 2), Leg((0, 3))]}
    study.optimize(pick_and_train, n_trials=1, executor=fleet)
    assert study.trials[0].value == 3.0


MIXED = [True, 1, RELU, math.nan, None, "relu"]


def pick_mixed(trial: Any) -> float:
    chosen = trial.suggest_categorical("mixed", MIXED)
    return float([type(choice) for choice in MIXED].index(type(chosen)))


class InTurn(optuna.samplers.RandomSampler):
    def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> Any:
        return distribution.choices[trial.number % len(distribution.choices)]


def test_among_objects_others_are_chosen_as_by_optuna(fleet: Any) -> None:
    study, plain = (optuna.create_study(sampler=InTurn()) for _ in range(2))
    fleet.script = {number: [Leg((0,))] for number in range(12)}  # one by one
    study.optimize(pick_mixed, n_trials=12, executor=fleet)
    plain.optimize(pick_mixed, n_trials=12)
    assert [trial.value for trial in study.trials] == [trial.value for trial in plain.trials]


def swap(trial: Any) -> float:
    trial.suggest_categorical("act", [RELU, TANH] if trial.number == 0 else [TANH, RELU])
    return 0.0


def test_other_objects_are_refused_as_by_optuna(fleet: Any) -> None:
    study = optuna.create_study()
    with pytest.raises(ValueError, match="does not support dynamic value space"):
        study.optimize(swap, n_trials=2, executor=fleet)


def test_a_storage_that_can_not_keep_them_says_so(fleet: Any, tmp_path: Path) -> None:
    study = optuna.create_study(storage=f"sqlite:///{tmp_path}/study.db")
    with pytest.raises(TypeError, match="Act is not JSON serializable"):
        study.optimize(pick, n_trials=1, executor=fleet)


@pytest.mark.parametrize(
    ("new", "words"),
    [
        (threading.Lock, "can't be pickled"),
        (OfItsOwn, "must be equal to a copy of itself"),
        (lambda: nn.Linear(1, 1), "must be equal to a copy of itself"),
    ],
)
def test_what_is_another_object_in_each_process_is_refused(
    fleet: Any, new: Any, words: str
) -> None:
    def choose(trial: Any) -> float:
        trial.suggest_categorical("it", [new(), None])
        return 0.0

    with pytest.raises(TrialError, match=rf"'it' is .*{words}.*: suggest a name instead"):
        optuna.create_study().optimize(choose, n_trials=1, executor=fleet)
