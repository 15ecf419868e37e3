"""Notices that the ranks of a trial have come apart: they would train different models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from optuna_fleet.trainer.gradients.collectives import find_divergence


class Replicas:
    """What was prepared, on each rank of a trial.

    Args:
        objects: This rank's.
        warn: Tells the user.
    """

    def __init__(self, objects: Sequence[Any], warn: Callable[[str], None]) -> None:
        self._objects = objects
        self._warn = warn
        self._are_apart = False

    def check(self) -> None:
        """Tell once if they are not the same; called on all ranks."""
        if self._are_apart or not (apart := find_divergence(self._objects)):
            return
        self._are_apart = True
        shown = ", ".join(apart[:3]) + (", ..." if len(apart) > 3 else "")
        self._warn(
            f"Its ranks have come apart: {shown}. On another number of "
            "devices it would give other results. What decides must be alike on all ranks: use "
            "trial.mean(loss) for it; prepare layers when the model is complete."
        )
