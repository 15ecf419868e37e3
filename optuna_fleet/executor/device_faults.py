"""Which devices fail by themselves, and are left out at last."""

from __future__ import annotations

from optuna_fleet.exceptions import LaunchError
from optuna_fleet.sampler_bridge.compat import fleet_logger

_MAX_IN_A_ROW = 3


class DeviceFaults:
    """Counts the errors of devices themselves, in a row for each of them.

    Args:
        num_devices: How many there are.

    Attributes:
        left_out: Those that get no more trials.
    """

    def __init__(self, num_devices: int) -> None:
        self._num_devices = num_devices
        self._in_a_row: dict[int, int] = {}
        self.left_out: set[int] = set()

    def worked(self, device: int) -> None:
        """A trial has left a device without such an error."""
        self._in_a_row.pop(device, None)

    def failed(self, device: int, problem: str) -> bool:
        """A device has failed; return whether it is left out from now on.

        Raises:
            LaunchError: It was the last.
        """
        number = self._in_a_row[device] = self._in_a_row.get(device, 0) + 1
        is_bad = number >= _MAX_IN_A_ROW
        verdict = "it is left out from now on" if is_bad else f"{number} in a row"
        fleet_logger.warning(f"Device {device} itself has failed, {verdict}: {problem}")
        if not is_bad:
            return False
        self.left_out.add(device)
        if len(self.left_out) == self._num_devices:
            raise LaunchError(
                f"No device is left: each has failed {_MAX_IN_A_ROW} times in a row, the last one "
                f"with: {problem}"
            )
        return True
