"""What `import optuna_fleet` changes of Optuna: the keyword `executor=`, and what goes with it."""

from __future__ import annotations

import functools
import inspect
from typing import Any, NoReturn

import optuna
from optuna.trial import BaseTrial

from optuna_fleet.arguments import check_that
from optuna_fleet.exceptions import FleetConfigError, OutsideFleetError

_MARK = "_optuna_fleet_original"


def install() -> None:
    """Make `optuna.Study.optimize` take ``executor=``; done by ``import optuna_fleet``.

    Without the keyword, or with None, Optuna's own method runs, argument for argument. Trials that
    Optuna runs itself raise an AttributeError, for what only a `FleetTrial` has, that says how to
    run them. `Study.trials_dataframe` shows what a fleet has noted of trials only where `attrs=`
    asks for system attributes. Calling it again changes nothing.
    """
    if hasattr(optuna.Study.optimize, _MARK):
        return
    for name, wrapped in _WRAPPERS.items():
        original = getattr(optuna.Study, name)
        wrapper = wrapped(original)
        setattr(wrapper, _MARK, original)
        setattr(optuna.Study, name, wrapper)
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

    return optimize


def _without_records(original: Any) -> Any:
    @functools.wraps(original)
    def trials_dataframe(self: optuna.Study, *args: Any, **kwargs: Any) -> Any:
        frame = original(self, *args, **kwargs)
        if args or "attrs" in kwargs:
            return frame
        return frame[[column for column in frame.columns if not _is_record(column)]]

    return trials_dataframe


def _is_record(column: str | tuple[str, str]) -> bool:
    name = column if isinstance(column, str) else "_".join(column)
    return name.startswith("system_attrs_optuna_fleet:")


_WRAPPERS = {"optimize": _with_executor, "trials_dataframe": _without_records}
"""Of methods of a study."""


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


def uninstall() -> None:
    """Put Optuna's own methods back."""
    if hasattr(optuna.Study.optimize, _MARK):
        for name in _WRAPPERS:
            setattr(optuna.Study, name, getattr(getattr(optuna.Study, name), _MARK))
        del BaseTrial.__getattr__  # type: ignore[attr-defined]
