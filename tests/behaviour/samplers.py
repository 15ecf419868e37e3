"""Samplers for tests; without torch, which costs a process seconds."""

from __future__ import annotations

import random
from typing import Any

import optuna


class ByNumber(optuna.samplers.BaseSampler):
    """Proposes what depends on the trial's number only."""

    def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
        return {}

    def sample_relative(self, study: Any, trial: Any, search_space: Any) -> dict[str, Any]:
        return {}

    def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> float:
        chance = random.Random(f"{trial.number} {name}")
        return chance.uniform(distribution.low, distribution.high)
