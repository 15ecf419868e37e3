"""How few and how many devices an objective wants."""

from __future__ import annotations

from dataclasses import dataclass

from optuna_fleet.arguments import check_number
from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.wire.messages import RunTrial


@dataclass(frozen=True, slots=True)
class Bounds:
    """Fewest and most devices that the objective wants; None for as many as it can use.

    They are of one type, unless it `spans_types`.
    """

    min_devices: int = 1
    max_devices: int | None = None
    spans_types: bool = False

    @classmethod
    def checked(
        cls,
        min_devices: int | None,
        max_devices: int | None,
        run: RunTrial,
        *,
        spans_types: bool = False,
    ) -> Bounds:
        """What was given to `FleetTrial.prepare` or `FleetTrial.pipeline`.

        Args:
            min_devices: None for one.
            max_devices: None for as many as it can use.
            run: Says how many devices a trial can have in this fleet.
            spans_types: They may be of several types.

        Raises:
            FleetConfigError: They are no numbers >= 1, or contradict each other or the fleet.
        """
        check_number("min_devices", min_devices, least=1, whole=True, optional=True)
        check_number("max_devices", max_devices, least=1, whole=True, optional=True)
        least = min_devices or 1
        fleet = ("the fleet has", run.num_of_all_types)
        if not spans_types:
            fleet = (f"{'' if run.are_alike else 'of one type '}the fleet has", run.num_devices)
        for what, most in (("`max_devices` is", max_devices), fleet):
            if most is not None and least > most:
                raise FleetConfigError(
                    f"`min_devices` is {least}, but {what} {most}: it must not be more."
                )
        return cls(least, max_devices, spans_types)
