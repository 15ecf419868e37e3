"""What a trial has reported so far, wherever it flew."""

from __future__ import annotations

import math
from collections.abc import Mapping

from optuna_fleet.exceptions import TrialError
from optuna_fleet.options import Convergence


class Reports:
    """The values of one trial: the first of each step, as the study keeps them.

    They are those that led to where the trial is now. The study may know more: a trial that lost
    its devices repeats epochs.

    Attributes:
        values: By step, in order of report.
        best: The best of them in the study's direction, which NaN never is; None for none.
    """

    def __init__(self, maximize: bool | None) -> None:
        self.values: dict[int, float] = {}
        self.best: float | None = None
        self._sign = 1.0 if maximize else -1.0

    @property
    def last_step(self) -> int | None:
        """The last step of them, as `optuna.trial.FrozenTrial.last_step`."""
        return max(self.values, default=None)

    def add(self, value: float, step: int) -> bool:
        """Note what was reported; return whether it is the best so far."""
        if step in self.values:
            return False
        self.values[step] = value
        if math.isnan(value) or (
            self.best is not None and self._sign * value <= self._sign * self.best
        ):
            return False
        self.best = value
        return True

    def begin_with(self, history: Mapping[int, float]) -> None:
        """Put what was reported up to a checkpoint before what was reported in this run."""
        own, self.values, self.best = self.values, {}, None
        for step, value in [*history.items(), *own.items()]:
            self.add(value, step)

    def is_best_before_last(self, value: float) -> bool:
        """Whether `value` is the best of the reported ones, and not the last of them."""
        return value == self.best and value != next(reversed(self.values.values()))

    def have_converged(self, criterion: Convergence) -> bool:
        """Whether they meet the criterion.

        Raises:
            TrialError: There are none.
        """
        if not self.values:
            raise TrialError(
                "trial.should_stop() was called before anything was reported: call "
                "trial.report(value, step) first."
            )
        return criterion.is_reached(list(self.values.values()), maximize=self._sign > 0)
