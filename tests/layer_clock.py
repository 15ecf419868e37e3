"""Layers of known costs: by a clock that they move themselves, whatever the machine does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from torch import Tensor, nn

from optuna_fleet.virtual_workers import measuring

_LOOK_S = 1e-6


class _Clock:
    now_s = 0.0

    def perf_counter(self) -> float:
        self.now_s += _LOOK_S  # what takes no time itself takes this
        return self.now_s


_CLOCK = _Clock()


class Taking(nn.Module):
    """Passes on what it gets, as if that took so long."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        _CLOCK.now_s += self.seconds
        return x


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """What layers cost, and how fast links are, is measured by that clock."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "time", _CLOCK)
        yield
