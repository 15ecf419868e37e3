"""Lets nodes join, and tells what becomes of them: by engine, channels, and silence."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from optuna_fleet.exceptions import LaunchError
from optuna_fleet.executor.cluster.agent.main import versions
from optuna_fleet.executor.cluster.config import NodeSetup, machine
from optuna_fleet.executor.cluster.engine import Departure, Engine
from optuna_fleet.executor.fleet.connections import Connections
from optuna_fleet.executor.fleet.departures import Departures
from optuna_fleet.executor.fleet.faults import DeviceFaults
from optuna_fleet.executor.fleet.nodes import LEASE_S, Node, Nodes, Startup
from optuna_fleet.resources import Device
from optuna_fleet.sampler_bridge.compat import fleet_logger
from optuna_fleet.wire.node_messages import (
    SIGN_EVERY_S,
    AgentFailed,
    AgentJoining,
    ConnectionEnded,
    NodeLeaving,
    NoticeGiven,
    Quit,
    Refused,
    SignOfLife,
    TrainerStarted,
)

NOTICE_S = 60.0
"""A node that is known to leave gets no more trials for so long before, and those there leave."""

_MAX_FAILED = 3
_NAMESAKE = (
    "Another node named {name} asks to join: give it another name, as in `optuna-fleet agent "
    "--name node-2`."
)


class Agents:
    """The agents of one executor.

    Args:
        departures: What the engine tells.
        faults: Says what is left out.
        set_up: What a node is told that joins with these devices.
        start_s: Seconds that a process has to become ready; None for no limit.

    Attributes:
        devices: All devices that ever were there, by number.
        startup: Which agents and trainers are awaited.
    """

    def __init__(
        self,
        engine: Engine,
        departures: Departures,
        connections: Connections,
        faults: DeviceFaults,
        set_up: Callable[[AgentJoining, tuple[Device, ...]], NodeSetup],
        *,
        start_s: float | None,
    ) -> None:
        self.nodes = Nodes(LEASE_S if engine.has_leases else None)
        self.devices: dict[int, Device] = {}
        self.startup = Startup(start_s)
        self.clock = time.monotonic
        self._engine = engine
        self._departures = departures
        self._connections = connections
        self._set_up = set_up
        self._faults = faults
        self._failed_starts: Counter[str] = Counter()
        self._namesakes: dict[str, tuple[AgentJoining, float]] = {}  # that wait, and since when
        self._left_out: set[str] = set()  # names of nodes, as the next
        self._have_worked: set[str] = set()  # nodes, by name, whose agent is known not to be gone
        self._why_ended: dict[str, str] = {}
        self._failures: dict[str, str] = {}  # of agents, as they told them with their last words
        self._notices: dict[str, Departure] = {}
        self._wanted: int | None = None
        engine.open(connections.invitation, departures)
        if engine.has_leases:
            connections.give_signs()
        for name in engine.expected():
            self._await(name)

    @property
    def awaits_nodes(self) -> bool:
        """Whether nodes may join that were never there."""
        return self._engine.more_may_join or self.are_starting

    @property
    def are_starting(self) -> bool:
        """Whether agents were started that have not joined yet."""
        there = {node.name for node in self.nodes}
        return not there.issuperset(self._engine.expected())

    def tell(self, agent: str, message: Any) -> None:
        """Send to an agent, if it is there."""
        self._connections.send(self._connections.agents.get(agent), message)

    def tell_node_of(self, device: int, message: Any) -> None:
        """Send to the agent of a device's node, if it is there."""
        if (node := self.nodes.of(device)) is not None:
            self.tell(node.agent, message)

    def note(self, message: Any) -> None:
        """Note what is about agents and nodes."""
        match message:
            case AgentJoining():
                self._joining(message)
            case AgentFailed():
                self._failures[message.node] = message.problem
            case SignOfLife():
                self.nodes.hear(message.agent)
                self._refuse_namesakes(message.agent)
            case NoticeGiven():
                if (node := self.nodes.get(message.agent)) is not None:
                    by, cause = time.time() + message.in_s, "its agent was told so by a SIGTERM"
                    self._notices[node.name] = Departure(node=node.name, cause=cause, by=by)
            case ConnectionEnded():
                self.nodes.cut_off(message.agent)
                self._namesakes.pop(message.agent, None)
            case TrainerStarted():
                if (node := self.nodes.of(message.device)) is not None:
                    self.nodes.hear(node.agent)  # from now on silence is none of a start
                    if node.has_tried_all(message.device):
                        self.startup.over(node.name)

    def has_worked(self, node: Node) -> None:
        """A trainer of a node was ready: should its agent end, another one is worth a try."""
        self._have_worked.add(node.name)

    # -- joining ----------------------------------------------------------------------------------

    def _joining(self, joining: AgentJoining) -> None:
        if self._connections.has_ended(joining.agent):  # its successor may be there by now
            self._connections.give_up(joining.agent)
            return
        if problem := self._objection(joining):
            self._refuse(joining, problem)
            return
        if self.nodes.named(joining.node) is not None:
            self._namesake_joining(joining)
            return
        self._failures.pop(joining.node, None)  # of the one before
        devices = self.nodes.numbered(joining)
        self.devices.update({device.index: device for device in devices})
        setup = self._set_up(joining, devices)
        self.nodes.join(joining, devices, is_here=joining.machine == machine())
        self._await(joining.node)
        self.tell(joining.agent, setup)

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
        if joining.node in self._left_out:
            return f"Node {joining.node} can't take part: it is left out, since none worked there."
        return ""

    def _refuse(self, joining: AgentJoining, problem: str) -> None:
        fleet_logger.warning(problem)
        self.tell(joining.agent, Refused(problem=problem))
        self._connections.give_up(joining.agent)

    def _namesake_joining(self, joining: AgentJoining) -> None:
        """The one that is there may be frozen or cut off: its lease tells."""
        if not self._engine.has_leases:
            self._refuse(joining, _NAMESAKE.format(name=joining.node))
            return
        self._namesakes[joining.agent] = joining, self.clock()
        fleet_logger.info(
            f"Another node named {joining.node} asks to join: it takes the place of the one that "
            f"is there, should nothing be heard of that for {LEASE_S:g} s."
        )

    def _refuse_namesakes(self, agent: str) -> None:
        """An agent lives: nobody takes its name. A sign may be as old as the gap between two."""
        node, now = self.nodes.get(agent), self.clock()
        for joining, since in list(self._namesakes.values()):
            if node is not None and joining.node == node.name and now - since > SIGN_EVERY_S:
                del self._namesakes[joining.agent]
                self._refuse(joining, _NAMESAKE.format(name=node.name))

    def admitted(self) -> list[AgentJoining]:
        """Those that have waited for the name of a node that is lost; each is told once."""
        free = [j for j, _ in self._namesakes.values() if self.nodes.named(j.node) is None]
        for joining in free:
            del self._namesakes[joining.agent]
        return free

    def _await(self, node: str) -> None:
        self.startup.started(node, f"The agent of node {node}")

    # -- leaving ----------------------------------------------------------------------------------

    def lost(self) -> Iterator[tuple[Node, str, bool]]:
        """Yield nodes that are lost, why in words, and whether another agent is started there.

        Raises:
            LaunchError: No agent can work on the last node: it ended before any trainer was
                ready, by itself, or was killed several times in a row.
        """
        for departure in self._departures.take():
            if departure.by is not None:
                self._notices[departure.node] = departure
                continue
            node = self.nodes.named(departure.node)
            told = self._explained(departure, node)
            is_replaced = self._ended(told)
            if node is not None:
                yield node, told.cause, is_replaced
        for node, cause in self.nodes.lost():
            self._engine.end(node.name)
            self.startup.over(node.name)
            told = self._explained(Departure(node=node.name, cause=cause), node)
            yield node, told.cause, False

    def _explained(self, departure: Departure, node: Node | None) -> Departure:
        """With what the agent has said of it, which may not have been read."""
        for message in self._connections.last_words(node.agent) if node is not None else ():
            if isinstance(message, AgentFailed):
                self.note(message)
        problem = self._failures.pop(departure.node, "")
        if not problem:
            return departure
        # However it ended then, it did so by itself.
        cause = f"its agent failed ({problem.removesuffix('.')})"
        return replace(departure, cause=cause, exit_code=1)

    def replaced_by(self, joining: AgentJoining) -> Node | None:
        """The node whose agent is gone, which may be unread, if this one joins in its place."""
        node = self.nodes.named(joining.node)
        return node if node is not None and self._connections.has_ended(node.agent) else None

    def leaving(self) -> Iterator[NodeLeaving]:
        """Yield nodes that will be gone soon; each is told once."""
        for name, notice in list(self._notices.items()):
            if (node := self.nodes.named(name)) is None:
                continue
            by = notice.by or 0.0
            node.is_leaving = by - time.time() <= NOTICE_S  # its time limit may have changed
            if node.is_leaving:
                del self._notices[name]
                at = time.strftime("%H:%M:%S", time.localtime(by))
                yield NodeLeaving(
                    text=f"Node {name} leaves at {at} ({notice.cause}); its trials move away.",
                    devices=tuple(device.index for device in node.devices),
                )

    def waits_s(self) -> list[float]:
        """Seconds until the next look at what no message tells of, if there is anything."""
        now, there = time.time(), {node.name for node in self.nodes}
        notices = (notice for name, notice in self._notices.items() if name in there)
        waits = [max(0.0, (notice.by or 0.0) - NOTICE_S - now) for notice in notices]
        return [*waits, *self.startup.waits_s(), *self.nodes.waits_s()]

    def _ended(self, departure: Departure) -> bool:
        """An agent has ended; return whether another one is expected in its place."""
        name = departure.node
        self.startup.over(name)
        self._notices.pop(name, None)
        why = self._why_ended.pop(name, "")
        has_worked = name in self._have_worked
        self._have_worked.discard(name)
        if not departure.is_replaced or name in self._left_out:
            return False
        self._failed_starts[name] = 0 if has_worked else self._failed_starts[name] + 1
        # One that was killed is tried again; one that ended by itself would do so again.
        was_killed = departure.exit_code is not None and departure.exit_code < 0
        if self._failed_starts[name] >= (_MAX_FAILED if was_killed else 1):
            number = self._failed_starts[name]
            often = f", {number} times in a row" if number > 1 else ""
            why = why or "what it printed says more"
            self._leave_out(name, f"{departure.cause} before any trainer was ready{often}; {why}.")
            return False
        self._await(name)
        return True

    def _leave_out(self, name: str, problem: str) -> None:
        """Go on without a node where no agent works.

        Raises:
            LaunchError: There is no other.
        """
        self._left_out.add(name)
        self._engine.end(name, for_good=True)
        others = (d for d in self.nodes.devices.values() if d.node_name != name)
        if not self.awaits_nodes and self._faults.left_out.issuperset(d.index for d in others):
            raise LaunchError(f"Node {name} can't be used: {problem}")
        self._faults.leave_out((), f"node {name}", problem)

    def want(self, num_devices: int | None) -> None:
        """So many devices would be used now; None: as many as there are."""
        nodes, num_there = None, len(self.nodes.devices)
        if num_devices is not None and num_there:
            nodes = math.ceil(num_devices * len(self.nodes) / num_there)
        if nodes != self._wanted:
            self._wanted = nodes
            self._engine.want(nodes)

    def forget(self, node: Node) -> None:
        """A node has left: nothing more is heard of it, and its notice is none of the next."""
        self._notices.pop(node.name, None)
        self._connections.give_up(node.agent)
        self.nodes.leave(node)
        self.startup.forget_trainers(node.agent)

    def end(self, name: str, why: str = "") -> None:
        """End the agent of a node; `lost` tells when it has, be it out of the engine's reach."""
        if why:
            self._why_ended[name] = why
        self._engine.end(name)
        if (node := self.nodes.named(name)) is not None:
            self._connections.cut(node.agent)

    def close(self) -> None:
        """End all agents."""
        for node in self.nodes:
            self.tell(node.agent, Quit())
        for name in self._engine.expected():
            if self.nodes.named(name) is None:
                self._engine.end(name)  # it is still starting, and would meet with no one
        self._connections.close()
        self._engine.close()
