"""The nodes of the fleet: which are there, under which numbers, and what is known of the others.

A node is known by its name, its agent by its incarnation. When another agent joins from a node,
its devices have the numbers that they had before.

Driver and agents give each other signs of life. An agent ends its children before the driver
places their trials again, so that no trial runs twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from optuna_fleet.executor.cluster.engine import Departure
from optuna_fleet.resources import Device
from optuna_fleet.wire.node_messages import AgentJoining, ProcessId

LEASE_S = 10.0
"""Seconds without a word from an agent after which its node is lost."""

DRIVER_LEASE_S = 6.0
"""Seconds without a word from the driver after which an agent ends, and all its children."""


@dataclass(slots=True, eq=False)
class Node:
    """A node, whose agents come and go.

    Attributes:
        agent: The incarnation of its agent, which has joined, or of the last one.
        devices: Its devices, under their numbers in the fleet.
        pid: Of the agent; None if that is on another machine.
        due: The time that counts of those by which the agent should be ready with its `starting`
            ones; None if none are awaited.
        starting: Devices whose trainers the agent has not tried to start.
        has_worked: A trainer of this agent was ready: another one is worth a try.
        failure: The last words of the agent, if it has failed.
        why_ended: Why we have ended it.
        notice: Of the node's end, until trials are told to leave.
        is_leaving: They were told.
    """

    name: str
    agent: str = ""
    devices: tuple[Device, ...] = ()
    pid: int | None = None
    due: object = None
    starting: set[int] = field(default_factory=set)
    has_worked: bool = False
    failure: str = ""
    why_ended: str = ""
    notice: Departure | None = None
    is_leaving: bool = False


class Nodes:
    """Those that are there, which is what it iterates over; and all others that were heard of.

    Attributes:
        devices: The devices that are there, by number.
        all_devices: Likewise, with those that were there at any time.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, Node] = {}
        self._there: dict[str, Node] = {}  # by agent
        self._numbers: dict[str, int] = {}
        self._device_numbers: dict[tuple[str, int], int] = {}
        self.devices: dict[int, Device] = {}
        self.all_devices: dict[int, Device] = {}

    def __iter__(self) -> Iterator[Node]:
        return iter(list(self._there.values()))

    def __len__(self) -> int:
        return len(self._there)

    def __getitem__(self, name: str) -> Node:
        """The node of this name, be it there or not."""
        return self._by_name.setdefault(name, Node(name))

    def get(self, agent: str) -> Node | None:
        """The node with this incarnation of an agent, if it is there."""
        return self._there.get(agent)

    def named(self, name: str) -> Node | None:
        """The node of this name, if it is there."""
        node = self[name]
        return node if node.agent in self._there else None

    def of(self, device: int) -> Node | None:
        """The node of a device, if it is there."""
        return self.named(self.devices[device].node_name) if device in self.devices else None

    def here(self) -> set[int]:
        """Numbers of the nodes that are on the driver's machine."""
        return {self._numbers[node.name] for node in self if node.pid is not None}

    def numbered(self, joining: AgentJoining) -> tuple[Device, ...]:
        """The devices of a node that joins, under their numbers in the fleet."""
        node = self._numbers.setdefault(joining.node, len(self._numbers))
        known = self._device_numbers
        return tuple(
            replace(
                device,
                node=node,
                node_name=joining.node,
                index=known.setdefault((joining.node, device.index), len(known)),
            )
            for device in joining.devices
        )

    def join(self, joining: AgentJoining, devices: tuple[Device, ...], *, is_here: bool) -> None:
        """A node has joined, with these devices."""
        self._there[joining.agent] = node = self[joining.node]
        node.agent, node.devices = joining.agent, devices
        node.starting = {device.index for device in devices}
        node.pid = joining.pid if is_here else None
        self.devices.update({device.index: device for device in devices})
        self.all_devices.update(self.devices)

    def leave(self, node: Node) -> None:
        """A node has left."""
        del self._there[node.agent]
        node.notice, node.is_leaving = None, False  # of its end, which is none of the next
        for device in node.devices:
            del self.devices[device.index]

    def pid_of(self, process: ProcessId | None) -> int | None:
        """Pid of a process that runs on this machine, else None."""
        node = None if process is None else self._there.get(process.agent)
        return None if process is None or node is None or node.pid is None else process.pid
