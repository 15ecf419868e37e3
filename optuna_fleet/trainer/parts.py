"""What one rank's training is made of: all that reads, holds, moves or saves it has these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from optuna_fleet.trainer.checkpoints.saving import Saver
from optuna_fleet.trainer.data.reading import EpochPosition
from optuna_fleet.trainer.gradients.reducer import Reducer
from optuna_fleet.trainer.gradients.replicas import Net
from optuna_fleet.trainer.gradients.weights import Weights
from optuna_fleet.trainer.moves.totals import Totals
from optuna_fleet.trainer.session import Session
from optuna_fleet.trainer.steps import Steps
from optuna_fleet.wire.messages import RunTrial


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Of the trial that a `Session` is about; they last as long as its objective runs here.

    Attributes:
        session: This rank's calls.
        device: This rank's.
        objects: What was prepared so far; grows while the objective runs.
        state: ``trial.state``.
        position: Where the objective is in its epochs.
        steps: What is done with the batches.
        weights: What these weigh; counts the ranks' collectives.
        reducer: Of the gradients of all that was prepared.
        net: Watches that the ranks stay the same.
        totals: Sums over the epoch.
        saver: Writes checkpoints.
    """

    session: Session
    device: torch.device
    objects: list[Any]
    state: dict[str, Any]
    position: EpochPosition
    steps: Steps
    weights: Weights
    reducer: Reducer
    net: Net
    totals: Totals
    saver: Saver

    @property
    def run(self) -> RunTrial:
        """The run under way: another one may take over."""
        return self.session.run
