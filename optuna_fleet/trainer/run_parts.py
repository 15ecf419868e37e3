"""What all that reads, trains or watches has in common in one run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from optuna_fleet.trainer.data.reading import EpochPosition
from optuna_fleet.trainer.gradients.reducer import Reducer
from optuna_fleet.trainer.gradients.replicas import Net
from optuna_fleet.trainer.gradients.weights import Weights
from optuna_fleet.trainer.session import Session
from optuna_fleet.trainer.totals import Totals
from optuna_fleet.trainer.widths import Widths
from optuna_fleet.wire.messages import RunTrial


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Of one rank's training."""

    session: Session
    device: torch.device
    position: EpochPosition
    widths: Widths
    weights: Weights
    reducer: Reducer
    net: Net
    totals: Totals  # sums over the epoch
    objects: list[Any]  # what was prepared so far
    user: dict[str, Any]  # `trial.state`

    @property
    def run(self) -> RunTrial:
        """The run under way."""
        return self.session.run
