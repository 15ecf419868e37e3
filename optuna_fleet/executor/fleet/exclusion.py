"""Leaves out devices and nodes that keep failing: nothing is started there any more."""

from __future__ import annotations

from dataclasses import dataclass

from optuna_fleet.exceptions import LaunchError
from optuna_fleet.executor.fleet.agents import Agents
from optuna_fleet.executor.fleet.faults import DeviceFaults
from optuna_fleet.executor.fleet.trainers import Trainers
from optuna_fleet.wire.node_messages import LeaveOut


@dataclass(slots=True)
class Exclusion:
    """Leaves out devices and nodes that keep failing: nothing is started there any more."""

    _faults: DeviceFaults
    _agents: Agents
    _trainers: Trainers

    @property
    def nodes_in_use(self) -> set[str]:
        """Names of the nodes with devices that are not left out."""
        there = self._agents.nodes.devices.values()
        return {d.node_name for d in there if d.index not in self._faults.left_out}

    def node_of(self, device: int) -> str:
        """Name of the node of a device that has joined at any time."""
        return self._agents.devices[device].node_name

    def device_failed(self, device: int, problem: str) -> None:
        """A device itself has failed."""
        there, is_starting = self._agents.nodes.devices, self._agents.are_starting
        if self._faults.failed(device, problem, there=there, is_starting=is_starting):
            self._end_trainers(device)

    def start_failed(self, device: int, error: LaunchError) -> None:
        """No trainer can be started on a device.

        Raises:
            LaunchError: It is this error, and no other device is left.
        """
        left_out = self._faults.left_out.union([device])
        if left_out.issuperset(self._agents.nodes.devices) and not self._agents.are_starting:
            raise error
        self._faults.leave_out([device], f"device {device}", str(error))
        self._end_trainers(device)

    def leave_out_node(self, name: str, why: str) -> list[int]:
        """Leave out a node; return its devices."""
        devices = [number for number in self._agents.devices if self.node_of(number) == name]
        self._faults.leave_out(devices, f"node {name}", why)
        for device in devices:
            self._end_trainers(device)
        return devices

    def _end_trainers(self, device: int) -> None:
        if (process := self._trainers.process_on(device)) is not None:
            self._trainers.kill(device, process)
        self._trainers.leave_out(device)
        self._agents.tell_node_of(device, LeaveOut(device=device))
