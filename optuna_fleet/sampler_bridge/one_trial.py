"""One trial outside of a sweep: a study in memory that suggests to it what the user has given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.trial import BaseTrial, FixedTrial, FrozenTrial, TrialState

from optuna_fleet.arguments import check_that, is_a
from optuna_fleet.exceptions import FleetConfigError, TrialError


def study_of(given: Any, like: optuna.Study | None) -> optuna.Study:
    """A study whose next trial is suggested what was given, and has its number and attributes.

    Args:
        given: Parameters by name, or a trial that has them, or suggests them.
        like: The study that the objective may ask for its directions and attributes.

    Raises:
        FleetConfigError: They are neither.
    """
    wanted = "be a dict of parameters, or a trial, as study.best_trial"
    check_that("params_or_trial", given, is_a(Mapping, BaseTrial), wanted)
    check_that("study", like, is_a(optuna.Study), "be a study, or None", optional=True)
    trial = given if isinstance(given, BaseTrial) else FixedTrial(dict(given))
    params = trial.params if isinstance(given, BaseTrial) else dict(given)
    study = optuna.create_study(
        directions=_directions(trial, like),
        sampler=_AsGiven(trial),
        pruner=optuna.pruners.NopPruner(),
    )
    for key, value in (like.user_attrs if like else {}).items():
        study.set_user_attr(key, value)
    for _ in range(trial.number):  # whose seeds are of their numbers
        study.add_trial(optuna.create_trial(state=TrialState.FAIL))
    study.enqueue_trial(params, user_attrs=trial.user_attrs)
    return study


def _directions(trial: BaseTrial, like: optuna.Study | None) -> Sequence[Any]:
    study = trial.study if like is None and isinstance(trial, optuna.Trial) else like
    if study is not None:
        return study.directions
    values = trial.values if isinstance(trial, FrozenTrial) else None
    return ["minimize"] * len(values or [0.0])


def value_of(study: optuna.Study) -> float | list[float]:
    """What its last trial has returned.

    Raises:
        TrialPruned: It has raised that.
        TrialError: The study could not take it.
    """
    trial = study.trials[-1]
    if trial.state is TrialState.PRUNED:
        raise optuna.TrialPruned
    values: list[float] | None = trial.values
    if values is None:
        raise TrialError(
            "The objective has returned what is no value of its study, as the log says: give "
            "evaluate(..., study=study) one that has as many objectives."
        )
    return values[0] if len(values) == 1 else values


class _AsGiven(optuna.samplers.RandomSampler):
    """Suggests what another trial does."""

    def __init__(self, trial: BaseTrial) -> None:
        super().__init__()
        self._trial = trial

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        try:
            return _suggested(self._trial, param_name, param_distribution)
        except ValueError as error:
            raise FleetConfigError(
                f"The objective asks for the parameter {param_name!r}, which evaluate() was not "
                f"given ({error})"
            ) from error


def _suggested(trial: BaseTrial, name: str, space: Any) -> Any:
    match space:
        case FloatDistribution():
            return trial.suggest_float(name, space.low, space.high, step=space.step, log=space.log)
        case IntDistribution():
            return trial.suggest_int(name, space.low, space.high, step=space.step, log=space.log)
    return trial.suggest_categorical(name, space.choices)
