"""The trainers on devices: what is heard of them, what is late, which devices get none any more.

Of each it is heard that it was started, then what it says, then that it has ended; and all of this
of one before anything of the next on its device.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from enum import Enum
from functools import partial

from optuna_fleet.events import DeviceJoined, DeviceLost, Event
from optuna_fleet.exceptions import LaunchError
from optuna_fleet.executor.fleet.agents import Agents, Node, told_late
from optuna_fleet.executor.fleet.faults import MOST_IN_A_ROW, Faults
from optuna_fleet.processes import state_in_words
from optuna_fleet.sampler_bridge.compat import fleet_logger
from optuna_fleet.wire.node_messages import KillTrainer, ProcessId

_KILL_LIMIT_S = 10.0
_LOOK_AGAIN_S = 1.0


class _Status(Enum):
    STARTING = "starting"
    SERVING = "serving"  # the controller knows it
    LEAVING = "leaving"  # it has said that it ends, which the controller knows


@dataclass(slots=True)
class _Slot:
    """The place of a trainer.

    Attributes:
        process: The trainer that was started last, until it is known to have ended.
        is_killed: By us: its death is no news.
        due: The only time that counts of those by which it should be ready, or gone.
    """

    process: ProcessId | None = None
    status: _Status = _Status.STARTING
    is_killed: bool = False
    due: object = None

    def put(self, process: ProcessId | None) -> None:
        """Another one, if it is another one."""
        if self.process != process:
            self.process, self.status = process, _Status.STARTING
            self.is_killed, self.due = False, None

    def is_served_by(self, process: ProcessId) -> bool:
        """Whether this one serves here."""
        return self.process == process and self.status is _Status.SERVING


class Trainers:
    """Those of all devices: at most one on each.

    Attributes:
        have_served: Devices on which one has served since their node has joined.
    """

    def __init__(self, agents: Agents, faults: Faults) -> None:
        self._agents, self._faults = agents, faults
        self._slots: defaultdict[int, _Slot] = defaultdict(_Slot)
        self.have_served: set[int] = set()

    @property
    def live(self) -> dict[int, ProcessId]:
        """Those that serve, by device."""
        processes = {device: self.process_on(device) for device in self._slots}
        return {device: one for device, one in processes.items() if one is not None}

    def process_on(self, device: int) -> ProcessId | None:
        """The one that serves."""
        slot = self._slots[device]
        return slot.process if slot.status is _Status.SERVING else None

    def is_killed(self, device: int) -> bool:
        """Whether the one that serves is killed by us: its death is no news."""
        return self.process_on(device) is not None and self._slots[device].is_killed

    # -- what happens -----------------------------------------------------------------------------

    def started(self, device: int, process: ProcessId) -> None:
        """An agent has started one; it may have been ready before this is heard."""
        slot = self._slots[device]
        if slot.process != process:
            slot.put(process)
            self._expect(device, self._agents.start_s)

    def ready(self, device: int, process: ProcessId) -> list[Event]:
        """One is ready, and serves; it may be killed, because it was late."""
        slot = self._slots[device]
        slot.put(process)
        if slot.is_killed:
            return []
        slot.due = None
        if device in self._faults.left_out:
            return []
        slot.status = _Status.SERVING
        self.have_served.add(device)
        self._faults.worked(f"the trainer of device {device}")
        return [DeviceJoined(device=self._agents.devices[device])]

    def retire(self, device: int, process: ProcessId) -> None:
        """One has said that it ends."""
        slot = self._slots[device]
        slot.put(process)
        slot.status = _Status.LEAVING
        slot.due = slot.due if slot.is_killed else None

    def ended(self, device: int, process: ProcessId, cause: str) -> list[Event]:
        """One has ended.

        Raises:
            LaunchError: As others of its device did before they were of use, and no other device
                is left.
        """
        slot = self._slots[device]
        has_served, by_order = slot.is_served_by(process), slot.is_killed
        is_news = slot.process != process or slot.status is _Status.STARTING
        if slot.process == process:
            slot.put(None)
        if has_served:
            return [DeviceLost(device=device, by_order=by_order)]
        if is_news and device not in self._faults.left_out:
            number = self._faults.failed(f"the trainer of device {device}")
            if number >= MOST_IN_A_ROW:
                why = (
                    f"The trainer of device {device} ended {number} times in a row before it was "
                    f"ready, the last time with {cause}; what it printed says why."
                )
                self._leave_out(device, why, why)
        return []

    def node_lost(self, node: Node) -> dict[int, ProcessId]:
        """All on this node are dead; return those whose ends are still to be told."""
        there = [device.index for device in node.devices]
        self.have_served.difference_update(there)
        for device in there:
            if self.process_on(device) is None:
                self._slots[device].put(None)
        return {device: one for device in there if (one := self.process_on(device)) is not None}

    # -- what is done about it --------------------------------------------------------------------

    def kill(self, device: int) -> None:
        """Kill the one that serves; its successor announces itself."""
        if (process := self.process_on(device)) is not None:
            self._kill(device, process)

    def _kill(self, device: int, process: ProcessId) -> None:
        self._slots[device].is_killed = True
        self._expect(device, _KILL_LIMIT_S)
        self._agents.tell(process.agent, KillTrainer(device=device, pid=process.pid))

    def _expect(self, device: int, limit_s: float | None) -> None:
        if limit_s is not None:
            due = self._slots[device].due = object()
            self._agents.inbox.later(limit_s, partial(self._late, device, due))

    def _late(self, device: int, due: object) -> None:
        """One is not ready in time: because it is stopped, say. Or it was killed, and is there.

        Then it is an agent that does not do what it was told to; it is killed if it is stopped.
        """
        slot = self._slots[device]
        if slot.due is not due or (process := slot.process) is None:
            return
        node = self._agents.nodes.get(process.agent)
        if slot.is_killed:
            if node is not None:
                if state_in_words(node.pid):
                    self._agents.end(node.name)
                self._expect(device, _LOOK_AGAIN_S)
            return
        name, pid = f"The trainer of device {device}", self._agents.nodes.pid_of(process)
        told_late(name, self._agents.start_s, pid)
        self._kill(device, process)

    def device_failed(self, device: int, problem: str) -> None:
        """A device itself has failed.

        Raises:
            LaunchError: Once too often, and no other device is left.
        """
        number = self._faults.failed(f"device {device}")
        if number < MOST_IN_A_ROW:
            fleet_logger.warning(
                f"Device {device} itself has failed, {number} in a row: {problem}"
            )
            return
        often = f"failed {number} times in a row"
        self._leave_out(
            device,
            f"it has {often}, the last time with: {problem}",
            f"No device is left: each has {often}, the last one with: {problem}",
        )

    def _leave_out(self, device: int, why: str, why_none: str) -> None:
        left_out = self._faults.left_out.union([device])
        if left_out.issuperset(self._agents.nodes.devices) and not self._agents.are_starting:
            raise LaunchError(why_none)
        self._faults.leave_out(f"device {device}", [device], why)
        self._end_for_good(device)

    def leave_out_node(self, name: str, why: str) -> list[int]:
        """Leave out a node; return its devices."""
        all_devices = self._agents.devices.values()
        devices = [device.index for device in all_devices if device.node_name == name]
        self._faults.leave_out(f"node {name}", devices, why)
        for device in devices:
            self._end_for_good(device)
        return devices

    def _end_for_good(self, device: int) -> None:
        if self.process_on(device) is not None:
            self._slots[device].is_killed = True
            self._expect(device, _KILL_LIMIT_S)
        self._agents.tell_node_of(device, KillTrainer(device=device))
