"""What is known of training rates, and what allocation may expect of a trial."""

from __future__ import annotations

from optuna_fleet.alloc.rates import RateProfile, pooled_scaling

# A rate this far below what its plan was made for is a reason to decide again at once.
_SHORTFALL = 0.75


class Profiles:
    """Rate profiles by model structure, and the rates that follow from them.

    Args:
        known: Structure -> profile; grows with each measurement and may outlive this object.
        num_devices: Devices of the fleet: the widest rate anyone asks for.
    """

    def __init__(self, known: dict[str, RateProfile], num_devices: int) -> None:
        self._known = known
        self._num_devices = num_devices
        self._rates: dict[tuple[str, int], tuple[float, ...]] = {}
        self._scaling: float | None = None

    def is_measured(self, structure: str, width: int) -> bool:
        """Whether r(width) was measured for the structure."""
        profile = self._known.get(structure)
        return profile is not None and width in profile.measured

    def measure(self, structure: str, width: int, samples_per_s: float) -> bool:
        """Take a measurement; say whether it is far below what was expected."""
        profile = self._known.get(structure)
        if profile is None:
            self._known[structure] = RateProfile(
                structure=structure, measured={width: samples_per_s}
            )
            disappointing = False
        else:
            disappointing = samples_per_s < _SHORTFALL * self.rates(structure, width)[-1]
            self._known[structure] = profile.with_measurement(width, samples_per_s)
        self._rates.clear()
        self._scaling = None
        return disappointing

    def rates(self, structure: str, max_devices: int) -> tuple[float, ...]:
        """(r(1), r(2), ...) in samples/s up to ``max_devices`` or the whole fleet."""
        width = min(max_devices, self._num_devices)
        if (structure, width) not in self._rates:
            profile = self._known.get(structure)
            if profile is None:  # lost before it was measured: as good as any
                profile = RateProfile(structure=structure, measured={1: 1.0})
            self._rates[structure, width] = profile.rates(width, self._pooled_scaling())
        return self._rates[structure, width]

    def _pooled_scaling(self) -> float:
        if self._scaling is None:
            self._scaling = pooled_scaling(self._known.values())
        return self._scaling
