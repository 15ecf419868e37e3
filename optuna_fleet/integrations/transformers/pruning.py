"""Reports what Trainer evaluates, and prunes."""

from __future__ import annotations

import math
from typing import Any

import optuna
from transformers import TrainerCallback

from optuna_fleet.exceptions import FleetConfigError


class PruningCallback(TrainerCallback):
    """Reports a metric of each evaluation in training, and prunes the trial if it is to be.

    Steps are epochs from 0, or optimizer steps with ``eval_strategy="steps"``.

    Args:
        trial: What the objective was given, on a fleet or not.
        monitor: Name of the metric, as ``"eval_loss"``.
    """

    def __init__(self, trial: optuna.Trial, monitor: str = "eval_loss") -> None:
        self._trial = trial
        self._monitor = monitor
        self._trains = False
        self._seen: set[str] = set()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See `TrainerCallback`."""
        self._trains = True

    def on_evaluate(
        self,
        args: Any,
        state: Any,
        control: Any,
        metrics: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Report.

        Raises:
            TrialPruned: The pruner says so.
        """
        self._seen.update(metrics or {})
        if not self._trains or state.global_step == 0 or self._monitor not in (metrics or {}):
            return
        by_steps = getattr(args.eval_strategy, "value", args.eval_strategy) == "steps"
        assert metrics is not None
        step = state.global_step if by_steps else math.ceil(state.epoch) - 1
        self._trial.report(metrics[self._monitor], step)
        if self._trial.should_prune():
            raise optuna.TrialPruned(f"Trial was pruned at step {step}.")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tell of a name that no evaluation had.

        Raises:
            FleetConfigError: There was none of that name.
        """
        self._trains = False
        if self._seen and self._monitor not in self._seen:
            raise FleetConfigError(
                f"PruningCallback was to report {self._monitor!r}, but evaluations have given "
                f"{sorted(self._seen)} only: name one of them as `monitor`."
            )
