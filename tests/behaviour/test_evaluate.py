"""One trial outside of a sweep: what Optuna's own trials say, and what runs them."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.trial import FixedTrial

from optuna_fleet import Checkpoints, FleetConfigError, FleetExecutor, TrialError
from tests.behaviour.harness import small_model, small_pipeline, train_epoch

BOTH = pytest.mark.parametrize("cluster", ["local", "inline"])


def ported(trial: Any) -> float:
    lr = trial.suggest_float("lr", 1e-3, 1e-1, log=True)
    kind = trial.suggest_categorical("kind", ["a", "b"])
    num = trial.suggest_int("num", 1, 3)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    model, optimizer = trial.prepare(model, optimizer)
    for epoch in trial.epochs(2):
        train_epoch(trial, model, optimizer, [], batch_size=8)
        weights = torch.nn.utils.parameters_to_vector(model.parameters())
        trial.report(weights.sum().item() + num + (kind == "b"), epoch)
    return float(trial.best_value)


@pytest.mark.parametrize(
    "trial", [FixedTrial({"x": 1.0}), optuna.create_trial(value=1.0), optuna.create_study().ask()]
)
def test_optunas_own_trials_say_how_to_run_a_ported_objective(trial: Any) -> None:
    for name in ("prepare", "epochs", "batches", "is_resumed"):
        with pytest.raises(FleetConfigError, match=r"executor=FleetExecutor.*evaluate\("):
            getattr(trial, name)
        assert not hasattr(trial, name)
    with pytest.raises(AttributeError, match=r"object has no attribute 'prepair'$"):
        _ = trial.prepair
    if not isinstance(trial, optuna.Trial):
        assert copy.deepcopy(pickle.loads(pickle.dumps(trial))).user_attrs == {}


@BOTH
def test_the_best_trial_gives_its_value_again(cluster: str, tmp_path: Path) -> None:
    study = optuna.create_study(direction="maximize")
    folder = None if cluster == "inline" else Checkpoints(tmp_path, keep=3)
    with FleetExecutor(
        small_pipeline(), devices=1, device_type="cpu", cluster=cluster, checkpoints=folder
    ) as fleet:
        study.enqueue_trial({"lr": 1e-3, "kind": "a", "num": 1})
        study.enqueue_trial({"lr": 1e-3, "kind": "b", "num": 3})
        study.optimize(ported, n_trials=2, executor=fleet)
        files = sorted(tmp_path.rglob("*.pt"))
        assert study.best_trial.number == 1
        assert fleet.evaluate(ported, study.best_trial, study=study) == study.best_value
        alone = fleet.evaluate(ported, study.best_params, study=study)
        assert alone != study.best_value  # it has trial 0's seeds
        assert fleet.evaluate(ported, FixedTrial(study.best_params), study=study) == alone
    assert len(study.trials) == 2
    assert sorted(tmp_path.rglob("*.pt")) == files


@pytest.fixture
def inline() -> FleetExecutor:
    return FleetExecutor(cluster="inline")


def test_an_asked_trial_suggests_and_can_be_told(inline: FleetExecutor) -> None:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    study.ask()
    trial = study.ask()

    def objective(trial: optuna.Trial) -> float:
        assert trial.number == 1
        return trial.suggest_float("x", 0, 1) + trial.suggest_int("n", 0, 8, step=2)

    value = inline.evaluate(objective, trial)
    assert study.tell(trial, value).params["x"] + trial.params["n"] == value


def test_a_parameter_that_was_not_given_is_named(inline: FleetExecutor) -> None:
    for given in ({"y": 1.0}, FixedTrial({"y": 1.0}), optuna.create_trial(value=0.0)):
        with pytest.raises(FleetConfigError, match="parameter 'x', which evaluate"):
            inline.evaluate(lambda trial: trial.suggest_float("x", 0, 1), given)


def test_several_objectives(inline: FleetExecutor) -> None:
    study = optuna.create_study(directions=["minimize", "maximize"])
    study.set_user_attr("scale", 2.0)

    def objective(trial: optuna.Trial) -> tuple[float, float]:
        x = trial.suggest_float("x", 0, 1)
        return x, trial.study.user_attrs.get("scale", 1.0) * x

    study.enqueue_trial({"x": 0.5})
    study.optimize(objective, n_trials=1, executor=inline)
    assert inline.evaluate(objective, study.trials[0]) == [0.5, 0.5]
    assert inline.evaluate(objective, {"x": 0.5}, study=study) == [0.5, 1.0]
    with pytest.raises(TrialError, match="study=study"):
        inline.evaluate(objective, {"x": 0.5})


def test_what_it_raises_is_raised(inline: FleetExecutor) -> None:
    def objective(trial: optuna.Trial) -> float:
        if trial.suggest_float("x", 0, 1) > 0.5:
            raise optuna.TrialPruned
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        inline.evaluate(objective, {"x": 0.1})
    with pytest.raises(optuna.TrialPruned):
        inline.evaluate(objective, {"x": 0.9})


@pytest.mark.parametrize("wrong", [None, 3, [("x", 1)]])
def test_what_is_neither_parameters_nor_a_trial_is_refused(
    inline: FleetExecutor, wrong: Any
) -> None:
    with pytest.raises(FleetConfigError, match="`params_or_trial` is"):
        inline.evaluate(lambda trial: 0.0, wrong)
