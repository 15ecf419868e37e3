"""Which devices and nodes keep failing; what is late is killed, what fails too often left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from optuna_fleet.exceptions import LaunchError
from optuna_fleet.processes import state_in_words
from optuna_fleet.sampler_bridge.compat import fleet_logger
from optuna_fleet.wire.node_messages import KillTrainer, LeaveOut, ProcessId

if TYPE_CHECKING:  # they need what is counted here
    from optuna_fleet.executor.fleet.agents import Agents
    from optuna_fleet.executor.fleet.nodes import StartLate
    from optuna_fleet.executor.fleet.trainers import Trainers

_MAX_IN_A_ROW = 3
_KILL_LIMIT_S = 10.0
_LOOK_AGAIN_S = 1.0

MAX_TRIALS_LOST = 3
"""So many losses in a row, while another node makes progress, are the node's doing."""


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

    def failed(self, device: int, problem: str) -> str:
        """A device has failed; return why it is to be left out, once that was too often."""
        number = self._in_a_row[device] = self._in_a_row.get(device, 0) + 1
        if number >= _MAX_IN_A_ROW:
            return f"it has failed {number} times in a row, the last time with: {problem}"
        fleet_logger.warning(f"Device {device} itself has failed, {number} in a row: {problem}")
        return ""

    def leave_out(self, devices: Iterable[int], name: str, why: str) -> None:
        """These get no more trials: a device, or a whole node."""
        fleet_logger.warning(f"{name[0].upper()}{name[1:]} is left out from now on: {why}")
        self.left_out.update(devices)
        self.reasons[name] = why


@dataclass(frozen=True, slots=True, kw_only=True)
class KillLate:
    """A trainer that is killed should be gone by now."""

    process: ProcessId


@dataclass(slots=True)
class Exclusion:
    """Ends what is late; has nothing started any more where it keeps failing."""

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
        """A device itself has failed.

        Raises:
            LaunchError: Once too often, and no other device is left.
        """
        if why := self._faults.failed(device, problem):
            text = f"No device is left: each has failed {_MAX_IN_A_ROW} times in a row"
            self.leave_out(device, why, LaunchError(f"{text}, the last one with: {problem}"))

    def leave_out(self, device: int, why: str, error: LaunchError) -> None:
        """Leave out a device.

        Raises:
            LaunchError: It is this error, and no other device is left.
        """
        left_out = self._faults.left_out.union([device])
        if left_out.issuperset(self._agents.nodes.devices) and not self._agents.are_starting:
            raise error
        self._faults.leave_out([device], f"device {device}", why)
        self._end_trainers(device)

    def leave_out_node(self, name: str, why: str) -> list[int]:
        """Leave out a node; return its devices."""
        devices = [number for number in self._agents.devices if self.node_of(number) == name]
        self._faults.leave_out(devices, f"node {name}", why)
        for device in devices:
            self._end_trainers(device)
        return devices

    def end_late(self, late: StartLate) -> None:
        """Kill what was started and is not ready: because it is stopped, say."""
        if not self._agents.startup.is_late(late):
            return
        process = late.process
        state = state_in_words(self._agents.nodes.pid_of(process))
        problem = late.problem + (f" ({state})" if state else "")
        fleet_logger.warning(f"{problem}; it is killed, to be replaced by another one.")
        if isinstance(process, ProcessId):
            self.kill(process)
        else:
            self._agents.end(process, problem)

    def kill(self, process: ProcessId) -> None:
        """Kill a trainer; its successor announces itself."""
        self._note_kill(process)
        self._agents.tell(process.agent, KillTrainer(pid=process.pid))

    def _note_kill(self, process: ProcessId) -> None:
        self._trainers.kill(process)
        self._agents.inbox.later(_KILL_LIMIT_S, KillLate(process=process))

    def end_stopped_agent(self, late: KillLate) -> None:
        """Kill an agent that does not do what it was told to, because it is stopped."""
        node = self._agents.nodes.get(late.process.agent)
        if node is not None and self._trainers.lingers(late.process):
            if state_in_words(node.pid):
                self._agents.end(node.name)
            self._agents.inbox.later(_LOOK_AGAIN_S, late)

    def _end_trainers(self, device: int) -> None:
        if (process := self._trainers.process_on(device)) is not None:
            self._note_kill(process)
        self._agents.tell_node_of(device, LeaveOut(device=device))


@dataclass(slots=True)
class _Row:
    """Losses since the last progress on a node, by trial; which nodes and trials got on since."""

    trials: Counter[int] = field(default_factory=Counter)
    progressed: set[str] = field(default_factory=set)
    cleared: set[int] = field(default_factory=set)
    cause: str = ""

    @property
    def number(self) -> int:
        """A trial that may be to blame itself counts once."""
        return sum(n if trial in self.cleared else 1 for trial, n in self.trials.items())


class NodeFaults:
    """Counts, for each node of one call, trials that were lost there in a row.

    One trial that is lost again and again may be to blame itself, unless it gets on elsewhere; so
    may be the objective, if no other node makes progress either.
    """

    def __init__(self) -> None:
        self._rows: dict[str, _Row] = {}

    @property
    def any_lost(self) -> bool:
        """Whether there is anything to count: else it makes no difference who gets on."""
        return bool(self._rows)

    def lost(self, node: str, trial: int, cause: str) -> None:
        """A trial was lost there, by no doing of its own that is known."""
        row = self._rows.setdefault(node, _Row())
        row.trials[trial] += 1
        row.cause = cause

    def progressed(self, nodes: Iterable[str], trial: int) -> None:
        """A trial got on there: it ended an epoch, or ended."""
        for node in nodes:
            self._rows.pop(node, None)
            for row in self._rows.values():
                row.progressed.add(node)
                row.cleared.add(trial)

    def take_bad(self, there: Collection[str]) -> list[tuple[str, str]]:
        """Return each node that is to be left out, and why; it is named once."""
        bad = [
            (node, _why(row))
            for node, row in self._rows.items()
            if row.number >= MAX_TRIALS_LOST and row.progressed.intersection(there)
        ]
        for node, _ in bad:
            del self._rows[node]
        return bad


def _why(row: _Row) -> str:
    trials = ", ".join(map(str, sorted(row.trials)))
    return (
        f"trials were lost there {row.trials.total()} times in a row ({trials}), while others "
        f"make progress; the last one because {row.cause}"
    )
