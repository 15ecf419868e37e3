"""The nodes of the fleet: who joins, is silent, leaves: by engine, channels, and silence.

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
from functools import partial
from typing import Any

from optuna_fleet.exceptions import LaunchError
from optuna_fleet.executor.cluster.config import NodeSetup, machine, versions
from optuna_fleet.executor.cluster.engine import Departure, Engine
from optuna_fleet.executor.fleet.connections import AgentUnheard, Connections
from optuna_fleet.executor.fleet.faults import MOST_IN_A_ROW, Faults
from optuna_fleet.processes import state_in_words
from optuna_fleet.resources import Device
from optuna_fleet.sampler_bridge.compat import fleet_logger
from optuna_fleet.wire.node_messages import (
    AgentFailed,
    AgentJoining,
    NodeLeaving,
    NoticeGiven,
    ProcessId,
    Quit,
    Refused,
)

LEASE_S = 10.0
"""Seconds without a word from an agent after which its node is lost."""

DRIVER_LEASE_S = 6.0
"""Seconds without a word from the driver after which an agent ends, and all its children."""

NOTICE_S = 60.0
"""A node that is known to leave gets no more trials for so long before, and those there leave."""

_NAMESAKE = (
    "Another node named {name} asks to join: give it another name, as in `optuna-fleet agent "
    "--name node-2`; or start it again when the one that is there is lost."
)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGone:
    """A node is gone, as its engine says, and all is read that was said there."""

    agent: str
    departure: Departure


def told_late(name: str, limit_s: float | None, pid: int | None) -> str:
    """Tell that a process was not ready in time, and why, as far as is known; return that."""
    state = state_in_words(pid)
    problem = f"{name} was not ready within {limit_s:g} s" + (f" ({state})" if state else "")
    fleet_logger.warning(f"{problem}; it is killed, to be replaced by another one.")
    return problem


class Agents:
    """The agents of one executor.

    Args:
        set_up: What a node is told that joins with these devices.

    Attributes:
        nodes: Where they are.
        inbox: Where all is told that happens.
        start_s: Seconds that a process has to become ready; None for no limit.
    """

    def __init__(
        self,
        engine: Engine,
        connections: Connections,
        faults: Faults,
        set_up: Callable[[AgentJoining, tuple[Device, ...]], NodeSetup],
        *,
        start_s: float | None,
    ) -> None:
        self.nodes = Nodes()
        self.inbox = connections.inbox
        self.start_s = start_s
        self._engine = engine
        self._connections = connections
        self._set_up = set_up
        self._faults = faults
        engine.open(connections.invitation, connections.inbox)
        if engine.has_leases:
            connections.keep_leases(LEASE_S)
        for name in engine.expected():
            self._await(name)

    @property
    def devices(self) -> dict[int, Device]:
        """All devices that were there at any time, by number."""
        return self.nodes.all_devices

    @property
    def awaits_nodes(self) -> bool:
        """Whether nodes may join that were never there."""
        return self._engine.more_may_join or self.are_starting

    @property
    def are_starting(self) -> bool:
        """Whether agents were started that have not joined yet."""
        there = {node.name for node in self.nodes}
        return any(
            name not in there and not self._is_left_out(name) for name in self._engine.expected()
        )

    @property
    def in_use(self) -> set[str]:
        """Names of the nodes with devices that are not left out."""
        there = self.nodes.devices.values()
        return {d.node_name for d in there if d.index not in self._faults.left_out}

    def node_of(self, device: int) -> str:
        """Name of the node of a device that has joined at any time."""
        return self.devices[device].node_name

    def _is_left_out(self, node: str) -> bool:
        return f"node {node}" in self._faults.reasons

    def tell(self, agent: str, message: Any) -> None:
        """Send to an agent, if it is there."""
        self._connections.send(self._connections.agents.get(agent), message)

    def tell_node_of(self, device: int, message: Any) -> None:
        """Send to the agent of a device's node, if it is there."""
        if (node := self.nodes.of(device)) is not None:
            self.tell(node.agent, message)

    # -- joining ----------------------------------------------------------------------------------

    def joining(self, joining: AgentJoining) -> None:
        """An agent asks to join."""
        node = self.nodes.named(joining.node)
        if self._connections.has_ended(joining.agent):  # its successor may be there by now
            self._connections.give_up(joining.agent)
        elif problem := self._objection(joining):
            self._refuse(joining, problem)
        elif node is None:
            self._admit(joining)
        elif self._connections.has_ended(node.agent):  # which may be unread
            cause = "its connection ended"
            gone = AgentUnheard(agent=node.agent, cause=cause, has_successor=True)
            self._connections.give_up(node.agent, gone, joining)
        else:
            self._refuse(joining, _NAMESAKE.format(name=joining.node))

    def _admit(self, joining: AgentJoining) -> None:
        self.nodes[joining.node].failure = ""  # of the one before
        devices = self.nodes.numbered(joining)
        setup = self._set_up(joining, devices)
        self.nodes.join(joining, devices, is_here=joining.machine == machine())
        self._await(joining.node)
        self.inbox.put(partial(self._leaving, joining.node))  # if it was told before
        self.tell(joining.agent, setup)

    def _await(self, name: str) -> None:
        if self.start_s is not None:
            due = self.nodes[name].due = object()
            self.inbox.later(self.start_s, partial(self._late, name, due))

    def _late(self, name: str, due: object) -> None:
        """An agent is not ready in time: because it is stopped, say."""
        node = self.nodes[name]
        if node.due is due:
            pid = node.pid if self.nodes.named(node.name) else None
            problem = told_late(f"The agent of node {node.name}", self.start_s, pid)
            node.due = None
            self.end(node.name, problem)

    def _objection(self, joining: AgentJoining) -> str:
        """Why a node can't take part, in words, or ""."""
        unlike = [
            f"{name} {theirs} (here {ours})"
            for name, ours in versions().items()
            if (theirs := joining.versions.get(name)) != ours
        ]
        if unlike:
            return (
                f"Node {joining.node} can't take part: it has {', '.join(unlike)}. Give it the "
                "same Python environment as the driver."
            )
        why = self._faults.reasons.get(f"node {joining.node}", "")
        return why and f"Node {joining.node} can't take part, since it is left out: {why}"

    def _refuse(self, joining: AgentJoining, problem: str) -> None:
        fleet_logger.warning(problem)
        self.tell(joining.agent, Refused(problem=problem))
        self._connections.give_up(joining.agent)

    # -- leaving ----------------------------------------------------------------------------------

    def failed(self, message: AgentFailed) -> None:
        """The last words of an agent."""
        self.nodes[message.node].failure = message.problem

    def departs(self, departure: Departure) -> list[NodeLeaving]:
        """An engine tells that a node is gone, or will be."""
        node = self.nodes.named(departure.node)
        if departure.by is not None:
            self.nodes[departure.node].notice = departure
            return self._leaving(departure.node)
        if node is None:
            self._ended(self._explained(departure))
        else:
            gone = NodeGone(agent=node.agent, departure=departure)
            self._connections.give_up(node.agent, gone)
        return []

    def gone(self, event: NodeGone | AgentUnheard) -> tuple[Node | None, str, bool]:
        """A node is gone; return it if it was there, why, and whether another agent is started.

        Raises:
            LaunchError: No agent can work on the last node: it ended before any trainer was
                ready, by itself, or was killed several times in a row.
        """
        node = self.nodes.get(event.agent)
        if isinstance(event, NodeGone):
            told = self._explained(event.departure)
            is_replaced = self._ended(told)
        elif node is None:
            return None, "", False
        else:
            told = self._explained(Departure(node=node.name, cause=event.cause))
            is_replaced, node.due = event.has_successor, None
            if not is_replaced:
                self._end(node.name)
        if node is not None:
            self.nodes.leave(node)
        return node, told.cause, is_replaced

    def _explained(self, departure: Departure) -> Departure:
        """With what the agent has said of it."""
        node = self.nodes[departure.node]
        problem, node.failure = node.failure, ""
        if not problem:
            return departure
        # However it ended then, it did so by itself.
        cause = f"its agent failed ({problem.removesuffix('.')})"
        return replace(departure, cause=cause, exit_code=1)

    def noticed(self, message: NoticeGiven) -> list[NodeLeaving]:
        """An agent was told that its node will be gone."""
        if (node := self.nodes.get(message.agent)) is None:
            return []
        by, cause = time.time() + message.in_s, "its agent was told so by a SIGTERM"
        return self.departs(Departure(node=node.name, cause=cause, by=by))

    def _leaving(self, name: str) -> list[NodeLeaving]:
        """Return a node that will be gone soon, or look again then; each is told once."""
        node = self.nodes.named(name)
        if node is None or (notice := node.notice) is None or notice.by is None:
            return []
        left_s = notice.by - NOTICE_S - time.time()
        node.is_leaving = left_s <= 0  # its time limit may have changed
        if not node.is_leaving:
            self.inbox.later(left_s, partial(self._leaving, name))
            return []
        node.notice = None
        at = time.strftime("%H:%M:%S", time.localtime(notice.by))
        return [
            NodeLeaving(
                text=f"Node {name} leaves at {at} ({notice.cause}); its trials move away.",
                devices=tuple(device.index for device in node.devices),
            )
        ]

    def _ended(self, departure: Departure) -> bool:
        """An agent has ended; return whether another one is expected in its place."""
        node, name = self.nodes[departure.node], f"node {departure.node}"
        why, has_worked = node.why_ended, node.has_worked
        node.due = node.notice = None
        node.why_ended, node.has_worked = "", False
        if not departure.is_replaced:
            return False
        if self._is_left_out(node.name):
            self._end(node.name, for_good=True)
            return False
        number = 0
        if has_worked:
            self._faults.worked(name)
        else:
            number = self._faults.failed(name)
        # One that was killed is tried again; one that ended by itself would do so again.
        was_killed = departure.exit_code is not None and departure.exit_code < 0
        if number >= (MOST_IN_A_ROW if was_killed else 1):
            often = f", {number} times in a row" if number > 1 else ""
            why = why or "what it printed says more"
            problem = f"{departure.cause} before any trainer was ready{often}; {why}."
            self._leave_out(node.name, problem)
            return False
        self._await(node.name)
        return True

    def _leave_out(self, name: str, problem: str) -> None:
        """Go on without a node where no agent works.

        Raises:
            LaunchError: There is no other.
        """
        self._end(name, for_good=True)
        self._faults.reasons[f"node {name}"] = problem  # it is not awaited any more
        others = {n for n, device in self.nodes.devices.items() if device.node_name != name}
        if not self.awaits_nodes and others <= self._faults.left_out:
            raise LaunchError(f"Node {name} can't be used: {problem}")
        self._faults.leave_out(f"node {name}", (), problem)

    def want(self, num_devices: int | None) -> None:
        """So many devices would be used now; None: as many as there are."""
        nodes, num_there = None, len(self.nodes.devices)
        if num_devices is not None and num_there:
            nodes = math.ceil(num_devices * len(self.nodes) / num_there)
        self._engine.want(nodes)

    def end(self, name: str, why: str = "") -> None:
        """End the agent of a node, whose end is heard of, be it out of the engine's reach."""
        self.nodes[name].why_ended = why or self.nodes[name].why_ended
        self._end(name)
        if (node := self.nodes.named(name)) is not None:
            self._connections.cut(node.agent)

    def _end(self, name: str, *, for_good: bool = False) -> None:
        # In a turn, as all that the engine hears: it may just be starting another one there.
        self.inbox.call_later(0.0, partial(self._engine.end, name, for_good=for_good))

    def close(self) -> None:
        """End all agents."""
        for node in self.nodes:
            self.tell(node.agent, Quit())
        starting = [name for name in self._engine.expected() if self.nodes.named(name) is None]
        self._connections.close()  # from now on no end is heard of, and nothing starts again
        for name in starting:
            self._engine.end(name)  # it would meet with no one
        self._engine.close()
