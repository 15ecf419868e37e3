"""`trial.totals`: sums that are the same on any number of devices, and wherever they were made."""

from __future__ import annotations

import torch

from optuna_fleet.trainer.gradients.weights import Weights
from optuna_fleet.trainer.totals import Totals

CPU = torch.device("cpu")


def test_from_a_checkpoint_they_go_on_on_the_device_of_what_is_added() -> None:
    """A scalar on the CPU, where checkpoints are read, takes nothing from a GPU."""
    device = torch.device("meta")
    totals = Totals(Weights(), device, lambda own: [own])
    totals.begin([{"loss": torch.tensor(0.5), "by label": torch.ones(2), "samples": 3}])
    assert {totals.own[name].device for name in ("loss", "by label")} == {device}
    assert totals.own["samples"] == 3
