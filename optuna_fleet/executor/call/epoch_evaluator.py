"""What the end of an epoch tells: has the trial converged, and how long may it still go on."""

from __future__ import annotations

from optuna_fleet.events import EpochEnded
from optuna_fleet.executor.cluster.protocol import Options
from optuna_fleet.sampler_bridge import compat
from optuna_fleet.sampler_bridge.ledger import Ledger


class EpochEvaluator:
    """Asks the user's convergence criterion and predictor about the trials of one call."""

    def __init__(self, options: Options, ledger: Ledger, *, maximize: bool | None) -> None:
        self._convergence = options.convergence
        self._predictor = options.predictor
        self._maximize = maximize
        self._ledger = ledger
        self._has_complained = False

    def epoch_ended(self, run_id: int, number: int, epochs_done: int) -> EpochEnded:
        """The event that a trial has done so many epochs."""
        return EpochEnded(
            run_id=run_id,
            epochs_done=epochs_done,
            converged=self.has_converged(number),
            predicted_epochs=self._predicted_epochs(number),
        )

    def has_converged(self, number: int) -> bool:
        """Whether a trial ends here."""
        if self._convergence is None or self._maximize is None:
            return False
        values = self._ledger.reported_values(number)
        return self._convergence.is_reached(values, maximize=self._maximize)

    def _predicted_epochs(self, number: int) -> float | None:
        """A predictor that fails is as good as none: it only ever helps to plan."""
        if self._predictor is None:
            return None
        try:
            predicted = self._predictor(self._ledger.frozen(number))
            return None if predicted is None else float(predicted)
        except Exception as error:
            if not self._has_complained:
                self._has_complained = True
                compat.fleet_logger.warning(
                    f"The predictor failed for trial {number}, and is passed over where it does: "
                    f"{type(error).__name__}: {error}"
                )
            return None
