"""What trials have the user told, once in a sweep though each of them may find it."""

from __future__ import annotations

from optuna_fleet.sampler_bridge import compat
from optuna_fleet.wire.messages import Remark


class Remarks:
    """Those of one call of `optimize`."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def take(self, number: int, remark: Remark) -> None:
        """Warn of what trial `number` found, unless that is known."""
        if not (remark.keys and self._told.issuperset(remark.keys)):
            self._told.update(remark.keys)
            compat.fleet_logger.warning(f"Trial {number}: {remark.text}")
