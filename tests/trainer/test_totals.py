"""`trial.totals`: sums that are the same on any number of devices, and wherever they were made."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.trainer.gradients.weights import Share, Weights
from optuna_fleet.trainer.moves.totals import Totals

CPU = torch.device("cpu")


class Ranks:
    """The totals of several ranks, one after the other in one process."""

    def __init__(self, num_ranks: int) -> None:
        self.weights = [Weights() for _ in range(num_ranks)]
        self.totals = [Totals(weights, CPU, lambda _: self.parts()) for weights in self.weights]

    def parts(self) -> list[Any]:
        return [totals.own for totals in self.totals]

    def read(self, sizes: tuple[int, ...]) -> None:
        for weights, size in zip(self.weights, sizes, strict=True):
            weights.hand_out(1, Share(size, sum(sizes)), lockstep=True, trains=True)

    def close(self) -> None:
        for weights, totals in zip(self.weights, self.totals, strict=True):
            weights.close(1)
            totals.void()


def test_what_ranks_add_is_summed_when_the_pass_is_over() -> None:
    ranks = Ranks(2)
    ranks.read((2, 1))
    for totals, size in zip(ranks.totals, (2, 1), strict=True):
        for _ in range(3):
            totals["samples"] += size
            totals["loss"] += torch.tensor(0.5, requires_grad=True) * size
            totals["score"] += np.float32(0.25)
            totals["by label"] += torch.tensor([1, size])
    assert ranks.totals[1]["samples"] == 3
    assert not ranks.totals[1].own["loss"].requires_grad
    assert ranks.totals[1].own["loss"].dtype == torch.float64
    ranks.close()
    for totals in ranks.totals:
        assert (totals["samples"], totals["loss"], totals["score"]) == (9, 4.5, 1.5)
        assert totals["by label"].tolist() == [6, 9]
        assert totals.mean("loss", "samples") == 0.5
        assert math.isnan(totals.mean("loss", "what was never added to"))


def test_a_stand_in_sample_counts_for_nothing() -> None:
    ranks = Ranks(2)
    for sizes in ((2, 1), (1, 0)):
        ranks.read(sizes)
        for totals in ranks.totals:
            totals["batches"] += 1
            totals["tensor"] += torch.ones(2)
    ranks.close()
    assert ranks.totals[0]["batches"] == 3
    assert ranks.totals[0]["tensor"].tolist() == [3.0, 3.0]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_they_go_on_on_any_number_of_ranks(num_ranks: int) -> None:
    before, after = Ranks(2), Ranks(num_ranks)
    before.read((1, 1))
    for rank, totals in enumerate(before.totals):
        totals["a"] += rank + 1
        totals["b"] += torch.tensor([1.0, rank])
    for rank, totals in enumerate(after.totals):
        totals.begin(before.parts(), rank, num_ranks)
    if num_ranks == 2:
        assert [part["a"] for part in after.parts()] == [1, 2]
    after.read((1,) * num_ranks)
    for totals in after.totals:
        totals["a"] += 1
    after.close()
    assert after.totals[0]["a"] == 3 + num_ranks
    assert after.totals[0]["b"].tolist() == [2.0, 1.0]
    after.totals[0].begin()
    after.totals[0].void()
    assert after.totals[0].own == {}


def test_from_a_checkpoint_they_go_on_on_the_device_of_what_is_added() -> None:
    """A scalar on the CPU, where checkpoints are read, takes nothing from a GPU."""
    device = torch.device("meta")
    totals = Totals(Weights(), device, lambda own: [own])
    totals.begin([{"loss": torch.tensor(0.5), "by label": torch.ones(2), "samples": 3}])
    assert {totals.own[name].device for name in ("loss", "by label")} == {device}
    assert totals.own["samples"] == 3


def test_what_is_read_from_them_is_not_changed_later() -> None:
    ranks = Ranks(1)
    ranks.read((1,))
    (totals,) = ranks.totals
    totals["a"] += torch.zeros(1)
    seen = totals["a"]
    totals["a"] += torch.ones(1)
    assert seen.tolist() == [0.0]


@pytest.mark.parametrize("value", ["text", [1], torch.tensor(1j), np.zeros(2)])
def test_what_is_no_number_is_refused(value: Any) -> None:
    ranks = Ranks(1)
    ranks.read((1,))
    with pytest.raises(FleetConfigError, match=r"trial\.totals\['x'\].*trial\.state"):
        ranks.totals[0]["x"] = value


@pytest.mark.parametrize("name", [3, ("correct", 3)])
def test_names_are_strings(name: Any) -> None:
    """Others would come back as something else, or could not be told to other ranks."""
    ranks = Ranks(1)
    ranks.read((1,))
    with pytest.raises(FleetConfigError, match="names are strings"):
        ranks.totals[0][name] += 1


def test_outside_of_a_pass_nothing_is_added() -> None:
    with pytest.raises(FleetConfigError, match="0 when an epoch begins"):
        Ranks(1).totals[0]["loss"] = 0.0
