"""Gives `optuna.Study.optimize` the keyword `executor=`."""

from __future__ import annotations

import functools
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

    @functools.wraps(original)
    def optimize(
        self: optuna.Study, func: Any, *args: Any, executor: Any = None, **kwargs: Any
    ) -> None:
        if executor is None:
            return original(self, func, *args, **kwargs)
        check_that(
            "executor",
            executor,
            _is_executor,
            "be a FleetExecutor, as optuna_fleet.FleetExecutor(devices=2), or None",
        )
        return executor.optimize(self, func, **_arguments(*args, **kwargs))  # type: ignore[no-any-return]

    setattr(optimize, _MARK, original)
    optuna.Study.optimize = optimize  # type: ignore[method-assign]


def _is_executor(value: Any) -> bool:
    return hasattr(value, "optimize") and not isinstance(value, type | optuna.Study)


def uninstall() -> None:
    """Put Optuna's own method back."""
    original = getattr(optuna.Study.optimize, _MARK, None)
    if original is not None:
        optuna.Study.optimize = original  # type: ignore[method-assign]


def _arguments(
    n_trials: Any = None,
    timeout: Any = None,
    n_jobs: int = 1,
    catch: Any = (),
    callbacks: Any = None,
    gc_after_trial: bool = False,
    show_progress_bar: bool = False,
) -> dict[str, Any]:
    """Optuna's arguments after the objective, less `n_jobs`, which must have its default."""
    if n_jobs != 1:
        raise FleetConfigError(
            f"`n_jobs` is {n_jobs}, but must be 1 together with `executor`: the executor runs as "
            "many trials at once as it has devices, FleetExecutor(devices=...)."
        )
    return {
        "n_trials": n_trials,
        "timeout": timeout,
        "catch": catch,
        "callbacks": callbacks,
        "gc_after_trial": gc_after_trial,
        "show_progress_bar": show_progress_bar,
    }
