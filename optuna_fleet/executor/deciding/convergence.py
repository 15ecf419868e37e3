"""When a trial has converged: a pure function of its reported values (FLEET 4.3.2, "Training")."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from optuna_fleet.arguments import check_number


@dataclass(frozen=True, slots=True, kw_only=True)
class Convergence:
    """A trial has converged once its reported value stopped improving.

    Attributes:
        patience: Number of reports in a row without an improvement.
        min_improvement: By how much a value must beat the best so far to count as an improvement.
    """

    patience: int
    min_improvement: float = 0.0

    def __post_init__(self) -> None:
        check_number("patience", self.patience, least=1, whole=True)
        check_number("min_improvement", self.min_improvement, least=0)

    def is_reached(self, values: Sequence[float], *, maximize: bool) -> bool:
        """Whether none of the last `patience` of `values` improved on the best before them."""
        best, stale = -math.inf, 0
        for value in values:
            gain = value if maximize else -value
            if gain > best + self.min_improvement:  # never true of NaN
                best, stale = gain, 0
            else:
                stale += 1
        return stale >= self.patience
