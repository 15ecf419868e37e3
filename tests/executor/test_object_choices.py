"""Choices that are objects: functions, instances, what `CategoricalDistribution` warns of."""

from __future__ import annotations

import functools
import math
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.samplers import GridSampler, PartialFixedSampler, RandomSampler
from torch import nn

from optuna_fleet import FleetExecutor, TrialError
from optuna_fleet.wire.packing import fingerprint, pack, unpack
from tests.fleets import Leg


class Act:
    """An activation, equal to no other."""

    def __init__(self, name: str) -> None:
        self.name = name


RELU, TANH = Act("relu"), Act("tanh")
SMALL, LARGE = (lambda: 1.0), (lambda: 2.0)  # no name to be found by: these travel by value


@pytest.fixture(autouse=True)
def _optuna_warns_of_objects() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Choices for a categorical distribution")
        yield


def kept(study: optuna.Study, name: str) -> list[Any]:
    """A parameter's values as the study has them, which `study.trials` copies."""
    return [trial.params[name] for trial in study.get_trials(deepcopy=False)]


def random_study(**options: Any) -> optuna.Study:
    return optuna.create_study(sampler=RandomSampler(0), **options)


def pick(trial: Any) -> float:
    """1 for each thing that is as without a fleet."""
    act = trial.suggest_categorical("act", [RELU, TANH])
    size = trial.suggest_categorical("size", choices=[SMALL, LARGE])
    again = trial.suggest_categorical("act", [RELU, TANH])
    params = trial.params
    trial.set_user_attr("act", act.name)
    trial.set_user_attr("size", size())
    assert trial.params["size"] is size
    return float(sum([act is RELU or act is TANH, again is act, params["act"] is act]))


@pytest.mark.parametrize("cluster", ["local", "inline"])
def test_choices_may_be_objects_of_the_script(fleet: Any, cluster: Any) -> None:
    study = random_study()
    executor = fleet if cluster == "local" else FleetExecutor(devices=1, cluster="inline")
    for _ in range(2):  # the second call's objects are those of the first
        study.optimize(pick, n_trials=6, executor=executor)
    assert [trial.value for trial in study.trials] == 12 * [3.0]
    for trial in study.trials:
        assert trial.params["act"].name == trial.user_attrs["act"]
        assert trial.params["size"]() == trial.user_attrs["size"]
    assert len(set(kept(study, "act"))) == len(set(kept(study, "size"))) == 2
    assert {trial.user_attrs["act"] for trial in study.trials} == {"relu", "tanh"}


def pick_and_train(trial: Any) -> float:
    value = pick(trial)
    names = trial.state.setdefault("names", [])
    for _ in trial.epochs(3):
        names.append(trial.suggest_categorical("act", [RELU, TANH]).name)
    assert names == 3 * [trial.params["act"].name]
    return value


def test_they_are_the_same_where_a_trial_flies_next(fleet: Any) -> None:
    study = random_study()
    fleet.script = {0: [Leg((0, 1), 1), Leg((2,), 2), Leg((0, 3))]}
    study.optimize(pick_and_train, n_trials=1, executor=fleet)
    assert study.trials[0].value == 3.0


ONE, OTHER = Act("one"), Act("other")


def pick_and_change(trial: Any) -> float:
    chosen = trial.suggest_categorical("act", [ONE, OTHER])
    ONE.used = OTHER.used = trial.number
    return float(chosen is ONE or chosen is OTHER)


def test_they_may_change(fleet: Any) -> None:
    study = random_study()
    fleet.script = {number: [Leg((number % 2,))] for number in range(6)}
    study.optimize(pick_and_change, n_trials=6, executor=fleet)
    assert [trial.value for trial in study.trials] == 6 * [1.0]


def test_one_may_be_put_in_the_queue(fleet: Any) -> None:
    study = random_study()
    for act in (TANH, RELU, TANH):
        study.enqueue_trial({"act": act, "size": LARGE})
    study.optimize(pick, n_trials=3, executor=fleet)
    assert sorted(trial.user_attrs["act"] for trial in study.trials) == ["relu", "tanh", "tanh"]
    assert {act.name for act in kept(study, "act")} == {"relu", "tanh"}
    assert set(kept(study, "size")) == {LARGE}  # the script's own


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: GridSampler({"act": [RELU, TANH], "size": [LARGE]}, seed=0),
        lambda: PartialFixedSampler({"size": LARGE}, RandomSampler(0)),
    ],
)
def test_one_may_be_given_to_a_sampler(
    fleet: Any, sampler: Callable[[], optuna.samplers.BaseSampler]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each has its own words for objects, or is experimental
        study = optuna.create_study(sampler=sampler())
        study.optimize(pick, n_trials=2, executor=fleet)
    assert kept(study, "size") == [LARGE, LARGE]


def test_a_study_may_be_begun_without_a_fleet(fleet: Any) -> None:
    study = random_study()
    study.optimize(pick, n_trials=2)
    study.optimize(pick, n_trials=2, executor=fleet)
    assert set(kept(study, "act")) <= {RELU, TANH}


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
    assert {2.0, 3.0} < {trial.value for trial in plain.trials}


def swap(trial: Any) -> float:
    trial.suggest_categorical("act", [RELU, TANH] if trial.number == 0 else [TANH, RELU])
    return 0.0


def test_other_objects_are_refused_as_by_optuna(fleet: Any) -> None:
    for executor in (None, fleet):
        study = random_study()
        with pytest.raises(ValueError, match="does not support dynamic value space"):
            study.optimize(swap, n_trials=2, executor=executor)


def test_a_storage_that_can_not_keep_them_says_so(fleet: Any, tmp_path: Path) -> None:
    for name, executor in (("plain", None), ("fleet", fleet)):
        study = random_study(storage=f"sqlite:///{tmp_path}/{name}.db")
        with pytest.raises(TypeError, match="Act is not JSON serializable"):
            study.optimize(pick, n_trials=1, executor=executor)


def choose_a_lock(trial: Any) -> float:
    trial.suggest_categorical("lock", [threading.Lock(), None])
    return 0.0


def test_what_can_not_be_sent_is_named(fleet: Any) -> None:
    with pytest.raises(TrialError, match=r"'lock' is <unlocked .*: suggest a name instead"):
        random_study().optimize(choose_a_lock, n_trials=1, executor=fleet)


OBJECTS: list[Any] = [
    RELU,
    SMALL,
    [TANH, LARGE, "relu"],
    functools.partial(Act, name="x"),
    nn.Linear(2, 3),
    lambda n: OBJECTS[-1](n - 1),  # refers to itself, and to all others
]


@pytest.mark.parametrize("value", OBJECTS)
def test_a_copy_has_the_same_fingerprint(value: Any) -> None:
    before = fingerprint(value)
    copies = [unpack(pack(value)), unpack(pack(unpack(pack(value))))]
    assert all(copy is not value for copy in copies)
    assert [fingerprint(each) for each in (*copies, value)] == 3 * [before]
    others = [each for each in OBJECTS if each is not value] + [nn.Linear(2, 3), TANH, LARGE]
    assert before not in [None, *map(fingerprint, others)]


def test_an_object_stays_the_same_when_its_class_changes() -> None:
    class Counted:
        count = 0

    value = Counted()
    before = fingerprint(value)
    Counted.count += 1
    assert fingerprint(value) == fingerprint(unpack(pack(value))) == before
