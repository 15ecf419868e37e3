"""Which devices fail by themselves, and which devices are left out at last."""

from __future__ import annotations

from collections.abc import Iterable

from optuna_fleet.exceptions import LaunchError
from optuna_fleet.sampler_bridge.compat import fleet_logger

_MAX_IN_A_ROW = 3


class DeviceFaults:
    """Counts the errors of devices themselves, in a row for each of them.

    Attributes:
        left_out: Those that get no more trials, for these errors or with their node.
        reasons: Why devices and nodes are left out, by their names.
    """

    def __init__(self) -> None:
        self._in_a_row: dict[int, int] = {}
        self.left_out: set[int] = set()
        self.reasons: dict[str, str] = {}

    def worked(self, device: int) -> None:
        """A trial has left a device without such an error."""
        self._in_a_row.pop(device, None)

    def failed(
        self, device: int, problem: str, *, there: Iterable[int], is_last: bool = True
    ) -> bool:
        """A device has failed; return whether it is left out from now on.

        Args:
            device: Which.
            problem: How, in words.
            there: All devices of the fleet.
            is_last: None is on its way beside these.

        Raises:
            LaunchError: It was the last.
        """
        number = self._in_a_row[device] = self._in_a_row.get(device, 0) + 1
        if number < _MAX_IN_A_ROW:
            fleet_logger.warning(
                f"Device {device} itself has failed, {number} in a row: {problem}"
            )
            return False
        why = f"it has failed {number} times in a row, the last time with: {problem}"
        self.leave_out([device], f"device {device}", why)
        if is_last and self.left_out.issuperset(there):
            raise LaunchError(
                f"No device is left: each has failed {_MAX_IN_A_ROW} times in a row, the last one "
                f"with: {problem}"
            )
        return True

    def leave_out(self, devices: Iterable[int], name: str, why: str) -> None:
        """These get no more trials: a device, or a whole node."""
        fleet_logger.warning(f"{name[0].upper()}{name[1:]} is left out from now on: {why}")
        self.left_out.update(devices)
        self.reasons[name] = why
