"""What all that reads, trains or watches has in common in one run."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from optuna_fleet.trainer.data.reading import EpochPosition
from optuna_fleet.trainer.gradients.reducer import Reducer
from optuna_fleet.trainer.gradients.replicas import Net
from optuna_fleet.trainer.gradients.weights import Weights
from optuna_fleet.trainer.moves.totals import Totals
from optuna_fleet.trainer.session import Session
from optuna_fleet.trainer.widths import Widths
from optuna_fleet.wire.messages import RunTrial


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Of one rank's training.

    Attributes:
        session: This rank's calls.
        device: This rank's.
        position: Where the objective is in its epochs.
        widths: On how many devices it trains.
        weights: What the batches weigh.
        reducer: Of the gradients of all that was prepared.
        net: Watches that the ranks stay the same.
        totals: Sums over the epoch.
    """

    session: Session
    device: torch.device
    position: EpochPosition
    widths: Widths
    weights: Weights
    reducer: Reducer
    net: Net
    totals: Totals

    @property
    def run(self) -> RunTrial:
        """The run under way."""
        return self.session.run
