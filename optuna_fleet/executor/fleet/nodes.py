"""The nodes of the fleet: which have joined, under which numbers, and who is silent for long.

A node is known by its name, its agent by its incarnation. When another agent joins from a node,
its devices have the numbers that they had before.

Driver and agents give each other signs of life. An agent ends its children before the driver
places their trials again, so that no trial runs twice.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from optuna_fleet.resources import Device
from optuna_fleet.wire.node_messages import AgentJoining, ProcessId

LEASE_S = 10.0
"""Seconds without a word from an agent after which its node is lost, once all is read that it may
have said meanwhile."""

DRIVER_LEASE_S = 6.0
"""Seconds without a word from the driver after which an agent ends, and all its children."""

_NUM_LOOKS = 10  # at who is silent, in the time of a lease

CAUSE_LIMIT_S = 0.5
"""For so long after a connection's end the engine may say what became of the agent."""


@dataclass(slots=True, kw_only=True)
class Node:
    """A node that has joined.

    Attributes:
        agent: The incarnation of its agent.
        devices: Its devices, under their numbers in the fleet.
        pid: Of its agent; None if that is on another machine.
        heard: When its agent was last heard of; infinite until it is up.
        starting: Devices whose trainers the agent has not tried to start.
        cut_off: When its connection ended; its end is told as soon as the cause is known.
        is_leaving: It was told that it will be gone soon.
    """

    name: str
    agent: str
    devices: tuple[Device, ...]
    pid: int | None
    heard: float = math.inf
    starting: set[int] = field(default_factory=set)
    cut_off: float | None = None
    is_leaving: bool = False

    def has_tried_all(self, device: int) -> bool:
        """Its agent has tried to start this device's trainer; return whether it was the last."""
        self.starting.discard(device)
        return not self.starting


class Nodes:
    """Those that are there now, and the numbers of all that ever were.

    Args:
        lease_s: Seconds of silence after which a node is lost; None for no limit.

    Attributes:
        devices: The devices that are there, by number.
    """

    def __init__(self, lease_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._lease_s = lease_s
        self._clock = clock
        self._looked = clock()
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

    # -- leases -----------------------------------------------------------------------------------

    def hear(self, agent: str) -> None:
        """An agent has said something."""
        if node := self._there.get(agent):
            node.heard = self._clock()

    def cut_off(self, agent: str) -> None:
        """The connection of an agent has ended."""
        if node := self._there.get(agent):
            node.cut_off = self._clock()

    def pid_of(self, process: ProcessId | str | None) -> int | None:
        """Pid of a process, or a node's agent, that runs on this machine; else None."""
        if isinstance(process, ProcessId):
            node = self._there.get(process.agent)
            return None if node is None or node.pid is None else process.pid
        named = None if process is None else self.named(process)
        return None if named is None else named.pid

    def waits_s(self) -> list[float]:
        """Seconds until the next look at who is silent, if there is anything to look at."""
        if any(node.cut_off is not None for node in self):
            return [CAUSE_LIMIT_S / 4]
        return [] if self._lease_s is None or not self._there else [self._lease_s / _NUM_LOOKS]

    def lost(self) -> list[tuple[Node, str]]:
        """Nodes that are lost now, and why, in words that end a sentence.

        What agents have said is read after each look. So a node is silent if nothing had been
        heard of it for as long as that at the look before this one, however long ago that was.
        """
        now, before = self._clock(), self._looked
        found = [
            (node, "its connection ended")
            for node in self
            if node.cut_off is not None and now - node.cut_off >= CAUSE_LIMIT_S
        ]
        if self._lease_s is None or now - before < self._lease_s / _NUM_LOOKS:
            return found
        self._looked = now
        silent = f"nothing was heard of it for {self._lease_s:g} s"
        cut_off = [node for node, _ in found]
        return found + [
            (node, silent)
            for node in self
            if node not in cut_off and before - node.heard >= self._lease_s
        ]


class Startup:
    """Watches processes from their start until they are ready: trainers, and agents by node."""

    def __init__(self, limit_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._due: dict[str | ProcessId, tuple[float, str]] = {}
        self._looked = clock()

    def started(self, process: str | ProcessId, name: str) -> None:
        """A process was started."""
        if self._limit_s is not None:
            self._due[process] = self._clock() + self._limit_s, name

    def over(self, process: str | ProcessId) -> None:
        """A process is ready, or has ended."""
        self._due.pop(process, None)

    def forget_trainers(self, agent: str) -> None:
        """An agent is gone, and all that it had started."""
        for process in [p for p in self._due if isinstance(p, ProcessId) and p.agent == agent]:
            del self._due[process]

    def waits_s(self) -> list[float]:
        """Seconds until the next look at those that are awaited, if there are any."""
        return [] if self._limit_s is None or not self._due else [self._limit_s / 4]

    def late(self) -> list[tuple[Any, str]]:
        """Those that are late now, and what is wrong in words; each is named once.

        As in `Nodes.lost`: they were so at the look before, and what they said is read.
        """
        now, before = self._clock(), self._looked
        self._looked = now
        if self._limit_s is None:
            return []
        late = [(process, name) for process, (due, name) in self._due.items() if due <= before]
        for process, _ in late:
            del self._due[process]
        return [(p, f"{name} was not ready within {self._limit_s:g} s") for p, name in late]
