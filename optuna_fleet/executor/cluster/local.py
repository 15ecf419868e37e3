"""The local cluster: agents on this machine, no set-up."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from optuna_fleet.arguments import check_number, check_that
from optuna_fleet.exceptions import FleetConfigError, LaunchError
from optuna_fleet.executor.cluster.config import AgentOptions, cores_set_aside, environment
from optuna_fleet.executor.cluster.devices import find_fleet
from optuna_fleet.executor.cluster.engine import Cluster, Engine, agent_ended
from optuna_fleet.executor.given import Options
from optuna_fleet.processes import ModuleProcess
from optuna_fleet.resources import cpu_count
from optuna_fleet.wire.inbox import Inbox
from optuna_fleet.wire.invitation import Invitation


class AgentProcess(ModuleProcess):
    """An agent as a child of the driver; it ends when its channel closes."""

    def __init__(self, options: AgentOptions, threads: int) -> None:
        variables = environment(threads, os.environ)
        super().__init__(
            "optuna_fleet.executor.cluster.agent.entry", options, environment=variables
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCluster(Cluster):
    """The devices of this machine.

    Args:
        nodes: Agents, each with `devices` of the executor: more than one serve to try out, on one
            machine, what happens on several. They share its cores, and its GPUs.
        slots_per_device: Trainers on each device: several small trials may share a GPU.
        kinds: What the devices of each node are said to be, as many names as there are nodes: to
            try out, on one machine, what happens on several device types.

    Raises:
        FleetConfigError: The first two are not from 1 to 1000, or the names are not as many.
    """

    nodes: int = 1
    slots_per_device: int = 1
    kinds: Sequence[str] | None = None

    def __post_init__(self) -> None:
        check_number("nodes", self.nodes, least=1, most=1000, whole=True)
        check_number("slots_per_device", self.slots_per_device, least=1, most=1000, whole=True)
        wanted = f"be as many names as there are nodes: {self.nodes}"
        check_that("kinds", self.kinds, self._are_names, wanted, optional=True)

    def _are_names(self, kinds: Any) -> bool:
        is_list = isinstance(kinds, list | tuple) and len(kinds) == self.nodes
        return is_list and all(isinstance(kind, str) and kind for kind in kinds)

    def engine(self, options: Options) -> Engine:
        """See `Cluster`."""
        if not hasattr(os, "pidfd_open"):
            raise FleetConfigError(
                f"cluster='local' needs Linux 5.3 or later, but this is {sys.platform!r}; "
                "cluster='inline' runs everywhere."
            )
        devices = find_fleet(options.devices, options.device_type, self.slots_per_device).devices
        cores = max(1, cpu_count() // self.nodes)
        left = cores - cores_set_aside(options.pipeline, devices, cores)
        return LocalEngine(self, options, cores=cores, threads=max(1, left // len(devices)))


class LocalEngine(Engine):
    """Starts the agents of a `LocalCluster`, and another one where one has ended."""

    host = "127.0.0.1"
    more_may_join = False

    def __init__(self, cluster: LocalCluster, options: Options, cores: int, threads: int) -> None:
        self.has_leases = cluster.nodes > 1
        self._cluster = cluster
        kinds: Sequence[str | None] = cluster.kinds or [None] * cluster.nodes
        self._kinds = {f"local-{number}": kind for number, kind in enumerate(kinds)}
        self._options = options
        self._cores = cores
        self._threads = threads
        self._agents: dict[str, AgentProcess] = {}

    def open(self, invitation: Invitation, inbox: Inbox) -> None:
        """See `Engine`."""
        self._invitation, self._inbox = invitation, inbox
        try:
            for node in self._kinds:
                self._start(node)
        except BaseException:
            self.close()
            raise

    def _start(self, node: str) -> None:
        given = AgentOptions(
            invitation=self._invitation,
            node=node,
            devices=self._options.devices,
            device_type=self._options.device_type,
            slots_per_device=self._cluster.slots_per_device,
            kind=self._kinds[node],
            cores=self._cores,
        )
        process = self._agents[node] = AgentProcess(given, self._threads)
        self._inbox.call_when_readable(process.fileno(), self._ended, node, process)

    def _ended(self, node: str, process: AgentProcess) -> None:
        process.close()
        if self._agents.get(node) is process:
            try:
                self._start(node)
            except LaunchError as error:
                self._inbox.put(error)
            else:
                self._inbox.put(agent_ended(node, process.exit_code or 0, is_replaced=True))

    def expected(self) -> Sequence[str]:
        """See `Engine`."""
        return tuple(self._agents)

    def end(self, node: str, *, for_good: bool = False) -> None:
        """See `Engine`."""
        if node in self._agents:
            self._agents[node].kill()
        if for_good:
            self._agents.pop(node, None)

    def close(self) -> None:
        """See `Engine`."""
        agents, self._agents = self._agents, {}
        for process in agents.values():
            process.close()
