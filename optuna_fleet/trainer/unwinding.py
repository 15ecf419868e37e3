"""A trial that leaves its devices leaves them, even if its objective catches everything."""

from __future__ import annotations

from collections.abc import Iterator

from optuna_fleet.trainer.session import Yielded
from optuna_fleet.trainer.training import Training


class UnwindingTraining(Training):
    """Training in a trainer: its session learns of `Yielded` before the objective does.

    The objective may not let it pass (a bare ``except:`` around its loop).
    """

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """See `FleetTrial.epochs`."""
        self._session.check()
        return self._noticed(super().epochs(num_epochs))

    def _noticed(self, epochs: Iterator[int]) -> Iterator[int]:
        try:
            yield from epochs
        except Yielded:
            self._session.unwind(Yielded)
