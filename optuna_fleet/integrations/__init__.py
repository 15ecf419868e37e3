"""For those whose training loop is another library's. Each module needs that library."""

from __future__ import annotations

from typing import Any

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.trainer.trial import FleetTrial


def fleet_trial(given: Any, taker: str) -> FleetTrial:
    """The trial that `taker`, of another library's kind, was given.

    Raises:
        FleetConfigError: It is not one of a fleet.
    """
    if isinstance(given, FleetTrial):
        return given
    raise FleetConfigError(
        f"{taker} was given a `{type(given).__name__}`, but takes the trial of an objective that "
        "runs on a fleet: study.optimize(..., executor=FleetExecutor(...))."
    )
