"""The nodes of the fleet: which have joined, under which numbers, and what is late there.

A node is known by its name, its agent by its incarnation. When another agent joins from a node,
its devices have the numbers that they had before.

Driver and agents give each other signs of life. An agent ends its children before the driver
places their trials again, so that no trial runs twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from optuna_fleet.resources import Device
from optuna_fleet.wire.inbox import Inbox
from optuna_fleet.wire.node_messages import AgentJoining, ProcessId

LEASE_S = 10.0
"""Seconds without a word from an agent after which its node is lost."""

DRIVER_LEASE_S = 6.0
"""Seconds without a word from the driver after which an agent ends, and all its children."""


@dataclass(slots=True, kw_only=True)
class Node:
    """A node that has joined.

    Attributes:
        agent: The incarnation of its agent.
        devices: Its devices, under their numbers in the fleet.
        pid: Of its agent; None if that is on another machine.
        starting: Devices whose trainers the agent has not tried to start.
        is_leaving: It was told that it will be gone soon.
    """

    name: str
    agent: str
    devices: tuple[Device, ...]
    pid: int | None
    starting: set[int] = field(default_factory=set)
    is_leaving: bool = False

    def has_tried_all(self, device: int) -> bool:
        """Its agent has tried to start this device's trainer; return whether it was the last."""
        self.starting.discard(device)
        return not self.starting


class Nodes:
    """Those that are there now, and the numbers of all that ever were.

    Attributes:
        devices: The devices that are there, by number.
    """

    def __init__(self) -> None:
        self._node_numbers: dict[str, int] = {}
        self._device_numbers: dict[tuple[str, int], int] = {}
        self._there: dict[str, Node] = {}
        self.devices: dict[int, Device] = {}

    def __iter__(self) -> Iterator[Node]:
        return iter(list(self._there.values()))

    def __len__(self) -> int:
        return len(self._there)

    def get(self, agent: str) -> Node | None:
        """The node with this incarnation of an agent, if it is there."""
        return self._there.get(agent)

    def named(self, name: str) -> Node | None:
        """The node of this name, if it is there."""
        return next((node for node in self if node.name == name), None)

    def of(self, device: int) -> Node | None:
        """The node of a device, if it is there."""
        return next((n for n in self if any(d.index == device for d in n.devices)), None)

    def here(self) -> set[int]:
        """Numbers of the nodes that are on the driver's machine."""
        return {self._node_numbers[node.name] for node in self if node.pid is not None}

    def numbered(self, joining: AgentJoining) -> tuple[Device, ...]:
        """The devices of a node that joins, under their numbers in the fleet."""
        node = self._node_numbers.setdefault(joining.node, len(self._node_numbers))
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

    def join(self, joining: AgentJoining, devices: tuple[Device, ...], *, is_here: bool) -> Node:
        """A node has joined, with these devices."""
        self._there[joining.agent] = node = Node(
            name=joining.node,
            agent=joining.agent,
            devices=devices,
            pid=joining.pid if is_here else None,
            starting={device.index for device in devices},
        )
        self.devices.update({device.index: device for device in devices})
        return node

    def leave(self, node: Node) -> None:
        """A node has left."""
        del self._there[node.agent]
        for device in node.devices:
            del self.devices[device.index]

    def pid_of(self, process: ProcessId | str | None) -> int | None:
        """Pid of a process, or a node's agent, that runs on this machine; else None."""
        if isinstance(process, ProcessId):
            node = self._there.get(process.agent)
            return None if node is None or node.pid is None else process.pid
        named = None if process is None else self.named(process)
        return None if named is None else named.pid


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StartLate:
    """A process has had its time to become ready: a trainer, or the agent of a node.

    Attributes:
        problem: What is wrong if it is not, in words.
    """

    process: str | ProcessId
    problem: str


class Startup:
    """Processes from their start until they are ready: trainers, and agents by node."""

    def __init__(self, inbox: Inbox, limit_s: float | None) -> None:
        self._inbox = inbox
        self._limit_s = limit_s
        self._awaited: dict[str | ProcessId, StartLate] = {}

    def started(self, process: str | ProcessId, name: str) -> None:
        """A process was started; `StartLate` comes when it should be ready."""
        if self._limit_s is not None:
            problem = f"{name} was not ready within {self._limit_s:g} s"
            late = self._awaited[process] = StartLate(process=process, problem=problem)
            self._inbox.later(self._limit_s, late)

    def over(self, process: str | ProcessId) -> None:
        """A process is ready, or has ended."""
        self._awaited.pop(process, None)

    def forget_trainers(self, agent: str) -> None:
        """An agent is gone, and all that it had started."""
        for process in list(self._awaited):
            if isinstance(process, ProcessId) and process.agent == agent:
                self.over(process)

    def is_late(self, late: StartLate) -> bool:
        """Whether it is, as it was expected; this is told once."""
        is_late = self._awaited.get(late.process) is late
        if is_late:
            self.over(late.process)
        return is_late
