"""The life of the trainer processes, by what is heard of them. Pure.

Of each it is heard that it was started, then what it says, then that it has ended; and all of this
of one before anything of the next on its device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from optuna_fleet.events import DeviceJoined, DeviceLost, Event
from optuna_fleet.exceptions import LaunchError
from optuna_fleet.resources import Device
from optuna_fleet.wire.node_messages import ProcessId

MAX_FAILED_STARTS = 3


class Trainers:
    """Those of all devices. A device has at most one that has joined the controller's fleet.

    Attributes:
        live: All that have joined, by device.
        have_served: Devices on which one has joined since their node has.
    """

    def __init__(self, devices: Mapping[int, Device]) -> None:
        self.live: dict[int, ProcessId] = {}
        self.have_served: set[int] = set()
        self._devices = devices
        self._killed: set[ProcessId] = set()  # and not known to be gone, as the next
        self._retired: set[ProcessId] = set()
        self._failed_starts: Counter[int] = Counter()

    def process_on(self, device: int) -> ProcessId | None:
        """The one that has joined."""
        return self.live.get(device)

    def is_killed(self, device: int) -> bool:
        """Whether the one that has joined is killed by us: its death is no news."""
        return self.live.get(device) in self._killed

    def serves(self, device: int) -> bool:
        """Whether one has joined that is not killed."""
        return device in self.live and not self.is_killed(device)

    def lingers(self, process: ProcessId) -> bool:
        """Whether one that is killed is not known to be gone."""
        return process in self._killed

    # -- what happens -----------------------------------------------------------------------------

    def started(self, device: int, process: ProcessId) -> bool:
        """Its agent has started one; say whether it is to be waited for."""
        return self.live.get(device) != process and process not in self._retired

    def ready(self, device: int, process: ProcessId) -> list[Event]:
        """One is ready, and joins; it may be killed, because it was late."""
        if process in self._killed:
            return []
        self._failed_starts[device] = 0
        self.live[device] = process
        self.have_served.add(device)
        return [DeviceJoined(device=self._devices[device])]

    def kill(self, process: ProcessId) -> None:
        """One is killed, because it is not ready in time, or while it serves."""
        self._killed.add(process)

    def retire(self, device: int, process: ProcessId) -> None:
        """One has said that it ends, which the controller knows."""
        self._retired.add(process)
        if self.live.get(device) == process:
            del self.live[device]

    def ended(self, device: int, process: ProcessId, cause: str) -> list[Event]:
        """One has ended.

        Raises:
            LaunchError: As others of its device did, before they were of use.
        """
        has_joined, has_retired = self.live.get(device) == process, process in self._retired
        lost = DeviceLost(device=device, by_order=process in self._killed)
        self.gone(process)
        if has_joined:
            del self.live[device]
            return [lost]
        if not has_retired:
            self._count_failed_start(device, cause)
        return []

    def gone(self, process: ProcessId) -> None:
        """One has ended, and nobody need hear of it."""
        self._killed.discard(process)
        self._retired.discard(process)

    def _count_failed_start(self, device: int, cause: str) -> None:
        self._failed_starts[device] += 1
        if (number := self._failed_starts[device]) >= MAX_FAILED_STARTS:
            raise LaunchError(
                f"The trainer of device {device} ended {number} times in a row before it was "
                f"ready, the last time with {cause}; what it printed says why."
            )

    def node_lost(self, agent: str) -> dict[int, ProcessId]:
        """All of this agent are dead; return those whose ends are still to be told."""
        left = {device: process for device, process in self.live.items() if process.agent == agent}
        for gone in (self._killed, self._retired):
            gone -= {one for one in gone if one.agent == agent and one not in left.values()}
        return left
