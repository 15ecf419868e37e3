"""How few and how many devices an objective wants."""

from __future__ import annotations

from dataclasses import dataclass

from optuna_fleet.arguments import check_number
from optuna_fleet.exceptions import FleetConfigError


@dataclass(frozen=True, slots=True)
class Bounds:
    """Fewest and most devices that the objective wants; None for as many as it can use."""

    min_devices: int = 1
    max_devices: int | None = None

    @classmethod
    def checked(cls, min_devices: int | None, max_devices: int | None, num_devices: int) -> Bounds:
        """What was given to `FleetTrial.prepare`.

        Args:
            min_devices: None for one.
            max_devices: None for as many as it can use.
            num_devices: Most devices that a trial can have in this fleet.

        Raises:
            FleetConfigError: They are no numbers >= 1, or contradict each other or the fleet.
        """
        check_number("min_devices", min_devices, least=1, whole=True, optional=True)
        check_number("max_devices", max_devices, least=1, whole=True, optional=True)
        least = min_devices or 1
        for what, most in (("`max_devices` is", max_devices), ("the fleet has", num_devices)):
            if most is not None and least > most:
                raise FleetConfigError(
                    f"`min_devices` is {least}, but {what} {most}: it must not be more."
                )
        return cls(least, max_devices)
