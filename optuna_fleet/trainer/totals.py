"""Sums over an epoch that follow a trial from device to device: `FleetTrial.totals`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.trainer.gradients.weights import Weights

Sums = dict[str, Any]


class Totals:
    """Named sums: what this rank adds while it reads batches, the sum over all ranks afterwards.

    ``trial.totals["loss"] += loss * trial.shard_size`` adds a number or a tensor. What was never
    added to is 0, and all are 0 when an epoch begins.
    """

    def __init__(
        self, weights: Weights, device: torch.device, gather: Callable[[Sums], list[Sums]]
    ) -> None:
        self.own: Sums = {}  # what this rank has added
        self._weights = weights  # tells whether its part of a batch counts
        self._device = device  # of tensors that are no scalars
        self._gather = gather  # from all ranks
        self._sums: Sums | None = None

    def __getitem__(self, name: str) -> Any:
        """This rank's part while it reads batches, else the sum, which all ranks must ask for."""
        if self._weights.is_reading:
            value = self.own.get(name, 0)
            return value.clone() if isinstance(value, torch.Tensor) else value
        self.merge()
        assert self._sums is not None
        return self._sums.get(name, 0)

    def __setitem__(self, name: str, value: Any) -> None:
        if not self._weights.is_reading:
            raise FleetConfigError(
                f"trial.totals[{name!r}] was set outside of a loop over trial.batches(...): it is "
                "0 when an epoch begins, and takes what is added while batches are read. Keep "
                "other variables in trial.state."
            )
        if not isinstance(name, str):
            raise FleetConfigError(
                f"trial.totals[{name!r}] was set, but names are strings: take "
                f"trial.totals[{str(name)!r}]."
            )
        if self._weights.present.dummy:  # a stand-in sample, which counts for nothing
            self.own.setdefault(name, 0)
        else:
            self.own[name] = self._summand(value, name)

    def mean(self, total: str, weight: str) -> Any:
        """Return ``totals[total] / totals[weight]``; NaN where that is 0."""
        divisor = self[weight]
        return self[total] / divisor if divisor else math.nan

    def begin(self, parts: Sequence[Sums] = (), rank: int = 0, world_size: int = 1) -> None:
        """Begin at 0, or where so many ranks have stopped with these parts."""
        self._sums = None
        if len(parts) != world_size:  # or as before, with the same rounding
            parts = [_added(parts), *[{}] * world_size]
        # All where they are added to: a sum on the CPU takes nothing from a GPU.
        own = {name: _on(self._device, v) for name, v in parts[rank].items()}
        self.own = {name: self._summand(value, name) for name, value in own.items()}

    def void(self) -> None:
        """Some ranks may add something."""
        self._sums = None

    def merge(self) -> None:
        """Add up what all ranks have added, unless it is known."""
        if self._sums is None:
            self._weights.begin("trial.totals")
            self._sums = _added(self._gather(self.own))

    def _summand(self, value: Any, name: str) -> Any:
        """A number, or a tensor without its graph and in double precision."""
        if isinstance(value, torch.Tensor) and not value.is_complex():
            value = value.detach().to(self._device if value.shape else value.device)
            return value.double() if value.is_floating_point() else value.long()
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, (int, float)):
            return value
        raise FleetConfigError(
            f"trial.totals[{name!r}] was given {value!r}, but takes numbers and tensors of real "
            "numbers: keep other variables in trial.state."
        )


def _on(device: torch.device, value: Any) -> Any:
    return value.to(device, copy=True) if isinstance(value, torch.Tensor) else value


def _added(parts: Sequence[Sums]) -> Sums:
    """Their sum, in the order of the ranks; scalar tensors become the numbers that they hold."""
    sums: Sums = {}
    for part in parts:
        for name, value in part.items():
            sums[name] = sums[name] + value if name in sums else value
    return {name: _number(value) for name, value in sums.items()}


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and not value.shape else value
