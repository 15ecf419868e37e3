"""What `import optuna_fleet` changes of Optuna: the keyword `executor=`, and what goes with it."""

from __future__ import annotations

import functools
import inspect
from typing import Any, NoReturn

import optuna
from optuna.trial import BaseTrial

from optuna_fleet.arguments import check_that
from optuna_fleet.exceptions import FleetConfigError, OutsideFleetError


def install() -> None:
    """Make `optuna.Study.optimize` take ``executor=``; done by ``import optuna_fleet``.

    Without the keyword, or with None, Optuna's own method runs, argument for argument. Trials that
    Optuna runs itself raise an AttributeError, for what only a `FleetTrial` has, that says how to
    run them. Calling it again changes nothing.
    """
    if not hasattr(optuna.Study.optimize, "takes_executor"):
        optuna.Study.optimize = _with_executor(optuna.Study.optimize)  # type: ignore[method-assign]
        BaseTrial.__getattr__ = _missing  # type: ignore[attr-defined]


def _with_executor(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def optimize(
        self: optuna.Study, func: Any, *args: Any, executor: Any = None, **kwargs: Any
    ) -> None:
        __tracebackhide__ = True
        if executor is None:
            original(self, func, *args, **kwargs)
            return
        check_that(
            "executor",
            executor,
            _is_executor,
            "be a FleetExecutor, as optuna_fleet.FleetExecutor(devices=2), or None",
        )
        bound = signature.bind(self, func, *args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        del given["self"], given["func"]
        if (n_jobs := given.pop("n_jobs")) != 1:
            raise FleetConfigError(
                f"`n_jobs` is {n_jobs}, but must be 1 together with `executor`: the executor runs "
                "as many trials at once as it has devices, FleetExecutor(devices=...)."
            )
        try:
            executor.optimize(self, func, **given)
        finally:
            del executor  # see `FleetExecutor._run`

    optimize.takes_executor = True  # type: ignore[attr-defined]
    return optimize


def _missing(trial: BaseTrial, name: str) -> NoReturn:
    """An attribute that Optuna's trials do not have."""
    from optuna_fleet.trainer.trial import FleetTrial  # not in each process of a fleet

    if name.startswith("_") or not hasattr(FleetTrial, name):
        problem = f"{type(trial).__name__!r} object has no attribute {name!r}"
        raise AttributeError(problem, name=name, obj=trial)
    raise OutsideFleetError(
        f"`trial.{name}` is only there in trials that a FleetExecutor runs: for a sweep call "
        "study.optimize(objective, ..., executor=FleetExecutor(...)), for a single trial "
        "FleetExecutor(...).evaluate(objective, trial), or with a dict of parameters."
    )


def _is_executor(value: Any) -> bool:
    return hasattr(value, "optimize") and not isinstance(value, type | optuna.Study)
