"""Gives `optuna.Study.optimize` the keyword `executor=`."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import optuna

from optuna_fleet.arguments import check_that
from optuna_fleet.exceptions import FleetConfigError

_MARK = "_optuna_fleet_original"


def install() -> None:
    """Make `optuna.Study.optimize` take ``executor=``; done by ``import optuna_fleet``.

    Without the keyword, or with None, Optuna's own method runs, argument for argument. Calling it
    again changes nothing.
    """
    original = optuna.Study.optimize
    if hasattr(original, _MARK):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def optimize(
        self: optuna.Study, func: Any, *args: Any, executor: Any = None, **kwargs: Any
    ) -> None:
        __tracebackhide__ = True
        if executor is None:
            return original(self, func, *args, **kwargs)
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
            del executor  # see `FleetExecutor.optimize`

    setattr(optimize, _MARK, original)
    optuna.Study.optimize = optimize  # type: ignore[method-assign]


def _is_executor(value: Any) -> bool:
    return hasattr(value, "optimize") and not isinstance(value, type | optuna.Study)


def uninstall() -> None:
    """Put Optuna's own method back."""
    original = getattr(optuna.Study.optimize, _MARK, None)
    if original is not None:
        optuna.Study.optimize = original  # type: ignore[method-assign]
