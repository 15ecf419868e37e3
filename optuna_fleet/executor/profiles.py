"""What is known of training rates, and what allocation may expect of a trial."""

from __future__ import annotations

import statistics
from dataclasses import replace

from optuna_fleet.alloc.rates import RateProfile, pooled_scaling, profile_key
from optuna_fleet.resources import Fleet

# A rate this far below what its plan was made for is a reason to decide again at once.
_SHORTFALL = 0.75


class Profiles:
    """Rate profiles by model structure and device type, and the rates that follow from them.

    What was never measured on a device type is estimated from another one: times the median of how
    much faster the one is than the other, over all structures measured on both; if there are none,
    they count as equally fast.

    Args:
        known: Profiles by `profile_key`; grows with each measurement and may outlive this object.
        fleet: What trials run on: its size is the widest rate anyone asks for.

    Attributes:
        kinds: Device types that are told apart; none if all are alike.
    """

    def __init__(self, known: dict[str, RateProfile], fleet: Fleet) -> None:
        self.kinds = fleet.kinds if len(fleet.kinds) > 1 else ()
        self._known = known
        self._num_devices = len(fleet)
        self._kind_of = {d.index: d.kind if self.kinds else "" for d in fleet.devices}
        self._rates: dict[tuple[str, str, int], tuple[float, ...]] = {}
        self._ratios: dict[tuple[str, str], tuple[int, float]] = {}
        self._scaling: float | None = None

    def is_measured(self, structure: str, devices: tuple[int, ...]) -> bool:
        """Whether the structure's rate on so many devices of their type was measured."""
        profile = self._known.get(profile_key(structure, self._kind_of[devices[0]]))
        return profile is not None and len(devices) in profile.measured

    def measure(self, structure: str, devices: tuple[int, ...], samples_per_s: float) -> bool:
        """Take a measurement; say whether it is far below what was expected."""
        width, kind = len(devices), self._kind_of[devices[0]]
        is_known = bool(self._profiles_of(structure))
        expected = self.rates(structure, width, kind)[-1] if is_known else 0.0
        key = profile_key(structure, kind)
        if profile := self._known.get(key):
            self._known[key] = profile.with_measurement(width, samples_per_s)
        else:
            measured = {width: samples_per_s}
            self._known[key] = RateProfile(structure=structure, measured=measured, kind=kind)
        self._rates.clear()
        self._ratios.clear()
        self._scaling = None
        return samples_per_s < _SHORTFALL * expected

    def rates(self, structure: str, max_devices: int, kind: str = "") -> tuple[float, ...]:
        """(r(1), r(2), ...) in samples/s up to ``max_devices`` or the whole fleet.

        Args:
            structure: Of the trial.
            max_devices: Most devices it can use.
            kind: Device type; "" where all are alike.
        """
        width = min(max_devices, self._num_devices)
        key = structure, kind, width
        if key not in self._rates:
            profile = self._known.get(profile_key(structure, kind))
            profile = profile or self._estimate(structure, kind)
            self._rates[key] = profile.rates(width, self._pooled_scaling())
        return self._rates[key]

    def _estimate(self, structure: str, kind: str) -> RateProfile:
        elsewhere = self._profiles_of(structure)
        if not elsewhere:  # lost before it was measured: as good as any
            return RateProfile(structure=structure, measured={1: 1.0}, kind=kind)
        source = max(elsewhere, key=lambda p: self._ratio(kind, p.kind)[0])
        _, ratio = self._ratio(kind, source.kind)
        return replace(source, measured={m: ratio * r for m, r in source.measured.items()})

    def _profiles_of(self, structure: str) -> list[RateProfile]:
        keys = (profile_key(structure, kind) for kind in self.kinds or ("",))
        return [self._known[key] for key in keys if key in self._known]

    def _ratio(self, kind: str, other: str) -> tuple[int, float]:
        """How many structures say how much faster one type is than the other, and how much."""
        if (kind, other) not in self._ratios:
            rates = self._single_rates(kind), self._single_rates(other)
            ratios = [rates[0][s] / rates[1][s] for s in rates[0].keys() & rates[1].keys()]
            ratio = statistics.median(ratios) if ratios else 1.0
            self._ratios[kind, other] = len(ratios), ratio
        return self._ratios[kind, other]

    def _single_rates(self, kind: str) -> dict[str, float]:
        return {p.structure: p.rates(1)[0] for p in self._known.values() if p.kind == kind}

    def _pooled_scaling(self) -> float:
        if self._scaling is None:
            self._scaling = pooled_scaling(self._known.values())
        return self._scaling
