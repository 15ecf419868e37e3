"""What allocation knows of one trial."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A trial that flies or could fly.

    Attributes:
        number: Trial number.
        rates: (r(1), ..., r(M)) in samples/s; widths beyond M are not considered. Where device
            types differ, those of the type it flies on, or any type's if it flies on none.
        devices: Devices it flies on now; empty if it waits.
        min_devices: Fewest devices it can fly on.
        max_devices: Most devices it can fly on; None for no limit but ``len(rates)``.
        waited_rounds: Decisions in which it has been passed over.
        epochs_done: Epochs it has finished; it is in the *phase* of this number.
        samples_per_epoch: Samples of one epoch; of one unit of work if that is not known.
        predicted_epochs: Epochs in all that somebody predicts; None if nobody does.
        max_epochs: Epochs after which it ends at the latest; None if that is not known.
        movable: Whether its devices can change now; if not, it stays where it flies.
        is_within_epoch: Whether it flies, and its epoch has not ended.
        rescale_up_s: Seconds of training lost when it gets more devices, or its first.
        rescale_down_s: Seconds of training lost when it gets fewer devices.
        rates_by_kind: Device type -> rates there, as many as ``rates``; empty if those hold on
            all types.
    """

    number: int
    rates: tuple[float, ...]
    devices: tuple[int, ...] = ()
    min_devices: int = 1
    max_devices: int | None = None
    waited_rounds: int = 0
    epochs_done: int = 0
    samples_per_epoch: float = 1.0
    predicted_epochs: float | None = None
    max_epochs: int | None = None
    movable: bool = True
    is_within_epoch: bool = False
    rescale_up_s: float = 0.0
    rescale_down_s: float = 0.0
    rates_by_kind: Mapping[str, tuple[float, ...]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for rates in (self.rates, *self.rates_by_kind.values()):
            assert len(rates) == len(self.rates) > 0, self
            assert all(0 < rate < math.inf for rate in rates), self
        assert 1 <= self.min_devices <= self.widest, self
        assert self.movable or 1 <= len(self.devices) <= len(self.rates), self

    @property
    def widest(self) -> int:
        """Most devices it can fly on."""
        known = len(self.rates)
        return known if self.max_devices is None else min(known, self.max_devices)

    def rate(self, m: int) -> float:
        """r(m) in samples/s."""
        return self.rates[m - 1]

    def rates_on(self, kind: str) -> tuple[float, ...]:
        """(r(1), ..., r(M)) in samples/s on devices of that type."""
        return self.rates_by_kind.get(kind, self.rates)

    def useful_widths(self, limit: int) -> tuple[int, ...]:
        """Admissible widths up to ``limit`` that are faster than every narrower one.

        The others waste devices: Eq. 5 of FLEET falls again beyond its peak.
        """
        return _useful_widths(self.rates, self.min_devices, min(self.widest, limit))


@lru_cache(maxsize=4096)
def _useful_widths(rates: tuple[float, ...], least: int, most: int) -> tuple[int, ...]:
    widths: list[int] = []
    for m in range(least, most + 1):
        if not widths or rates[m - 1] > rates[widths[-1] - 1]:
            widths.append(m)
    return tuple(widths)
