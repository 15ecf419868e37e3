"""Ray: an actor on each node has the agent as its child; autoscalers see actors that wait."""

from __future__ import annotations

import importlib
import logging
import operator
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna_fleet.accelerator import ACCELERATORS
from optuna_fleet.arguments import check_number
from optuna_fleet.exceptions import FleetConfigError, LaunchError
from optuna_fleet.executor.cluster.engine import (
    Cluster,
    Departure,
    Engine,
    PlacingEngine,
    agent_ended,
)
from optuna_fleet.executor.given import Options
from optuna_fleet.processes import dying_with_parent
from optuna_fleet.wire.invitation import Invitation

_LOOK_EVERY_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RayCluster(Cluster):
    """The nodes of a Ray cluster, also those that are added while trials run.

    An actor reserves on each node what its trials use, so that Ray gives it to nobody else. The
    executor's `device_type` says whether that is GPUs; by default it is, where a node has some.

    Args:
        address: Of the cluster, as for `ray.init`. By default it is the one that `ray.init` was
            called for, the one that this machine belongs to, or one that is started here.
        num_nodes: How many nodes to use; where there are fewer, actors wait, for which an
            autoscaler adds some. By default those that are there.
        gpus_per_node: What to reserve on each node; by default all of its GPUs.
        cpus_per_node: What to reserve on each node; by default all of its CPUs if trials train
            on these, none if they train on GPUs.
        slots_per_device: Trainers on each device: several small trials may share a GPU.

    Raises:
        FleetConfigError: Ray is not installed, or an argument is out of range.
    """

    address: str | None = None
    num_nodes: int | None = None
    gpus_per_node: int | None = None
    cpus_per_node: int | None = None
    slots_per_device: int = 1

    def __post_init__(self) -> None:
        for name in ("num_nodes", "gpus_per_node", "cpus_per_node", "slots_per_device"):
            is_optional = name != "slots_per_device"
            check_number(name, getattr(self, name), least=1, whole=True, optional=is_optional)
        ray_module()

    def engine(self, options: Options) -> Engine:
        """See `Cluster`."""
        if options.devices is not None:
            raise FleetConfigError(
                "With RayCluster the devices are those of its nodes: give gpus_per_node or "
                "cpus_per_node to RayCluster, not devices to the FleetExecutor."
            )
        agent = ("-m", "optuna_fleet", "agent", f"--slots-per-device={self.slots_per_device}")
        return RayEngine(self, agent, options.device_type)


def ray_module() -> Any:
    """Ray, or a `FleetConfigError` that says how to install it."""
    try:
        importlib.import_module("ray.util.scheduling_strategies")
        return importlib.import_module("ray")
    except ImportError as error:
        needs = f"RayCluster needs Ray, which can't be imported ({error})"
        raise FleetConfigError(f"{needs}: `pip install 'optuna-fleet[ray]'`.") from error


class Placed:
    """An actor, with which the agent dies that is its child."""

    def run(self, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
        """Start Python with these arguments; return its exit code."""
        paths = [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
        given = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        return subprocess.call(dying_with_parent(sys.executable, *arguments), env=given)


class RayEngine(PlacingEngine):
    """Starts agents on the nodes of a Ray cluster.

    Args:
        agent: Arguments of Python that start an agent, but for its name and devices.
        device_type: "cuda", "cpu", or None for "cuda" where a node has GPUs.
    """

    def __init__(
        self, cluster: RayCluster, agent: Sequence[str], device_type: str | None = None
    ) -> None:
        super().__init__("Ray")
        self._cluster, self._agent, self._device_type = cluster, agent, device_type
        self._actors: dict[str, tuple[Any, Future[int]]] = {}  # and their ends
        self._ray = ray_module()

    def expected(self) -> Sequence[str]:
        """See `Engine`."""
        return tuple(self._actors)

    def _prepare(self, invitation: Invitation) -> None:
        self._environment = invitation.environment()
        self._waiting: list[Any] = []
        self._awaited: tuple[int, list[str]] = 0, []  # how many, besides which nodes
        self._is_ours = not self._ray.is_initialized()
        address = self._cluster.address
        try:
            if self._is_ours:
                self._ray.init(address=address, logging_level=logging.WARNING)
        except (OSError, RuntimeError, ValueError, self._ray.exceptions.RayError) as error:
            raise LaunchError(
                f"Ray can't be used at {address=}: {error} Start it with `ray start --head`, or "
                "leave out the address: it starts here then."
            ) from error
        there = getattr(self._ray.get_runtime_context(), "gcs_address", address)
        if not self._is_ours and address not in (None, "auto", there):
            raise LaunchError(f"Ray is connected to {there}, not to {address}: leave that out.")
        has_gpus = self._cluster.gpus_per_node or self._ray.cluster_resources().get("GPU")
        self._on_gpus = (self._device_type or ("gpu" if has_gpus else "cpu")) != "cpu"
        self._place()
        if not (self._actors or self._awaited[0]):
            cpus, gpus = self._share({})
            raise LaunchError(
                f"No node of the Ray cluster has {cpus} CPUs and {gpus} GPUs for an agent: ask "
                "for less, or say RayCluster(num_nodes=...) for an autoscaler."
            )

    def _act(self) -> float:
        for node in self._ends():
            if node in self._actors:
                self._ray.kill(self._actors[node][0])
        ended = {name: end for name, (_, end) in self._actors.items() if end.done()}
        self._actors = {n: actor for n, actor in self._actors.items() if n not in ended}
        self._place()
        for name, end in ended.items():
            again = name in self._actors
            if error := end.exception():
                why = f"its Ray actor died: {str(error).splitlines()[-1].strip()}"
                did_not_die = isinstance(error, self._ray.exceptions.RayTaskError)
                code = None if did_not_die else -signal.SIGKILL  # an agent dies with its actor
                self._inbox.put(Departure(node=name, cause=why, exit_code=code, is_replaced=again))
            else:
                self._inbox.put(agent_ended(name, end.result(), is_replaced=again))
        return _LOOK_EVERY_S  # Ray tells of no node that is added

    def _place(self) -> None:
        if not self._ray.is_initialized():  # then it would start another cluster to look at
            raise LaunchError("ray.shutdown() was called while an executor was in use.")
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        usable = {
            f"{n['NodeManagerHostname']}-{n['NodeID'][:8]}": n for n in filter(self._fits, nodes)
        }
        numbers = [n for n in (self._wanted, self._cluster.num_nodes) if n is not None]
        wanted = min(numbers, default=len(usable))
        can_place = wanted > len(usable) or usable.keys() - self._left_out
        if usable and not (self._actors or can_place):
            raise LaunchError("the agents of all nodes failed; what they printed says why.")
        free = [name for name in usable if name not in self._left_out | self._actors.keys()]
        for name in free[: max(0, wanted - len(self._actors))]:
            self._start(name, usable[name])
        self._await(max(0, wanted - len(usable)), [node["NodeID"] for node in nodes])

    def _start(self, name: str, node: Mapping[str, Any]) -> None:
        cpus, gpus = share = self._share(node["Resources"])
        affinity = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        actor = self._actor(share, scheduling_strategy=affinity(node["NodeID"], soft=False))
        kind = self._device_type or ACCELERATORS[0].type
        devices = [f"--device-type={kind}"] if gpus else ["--device-type=cpu", f"--devices={cpus}"]
        run = actor.run.remote([*self._agent, "--name", name, *devices], self._environment)
        self._actors[name] = actor, run.future()
        self._actors[name][1].add_done_callback(lambda end: self._roused.set())

    def _await(self, number: int, nodes: list[str]) -> None:
        """Have so many actors wait for nodes beside these."""
        if self._awaited != (number, nodes):
            for actor in self._waiting:  # one may have got the room of an agent
                self._ray.kill(actor)
            self._awaited, least = (number, nodes), self._share({})
            elsewhere = {"ray.io/node-id": f"!in({','.join(nodes)})"}
            self._waiting = [self._actor(least, label_selector=elsewhere) for _ in range(number)]

    def _share(self, node: Mapping[str, float]) -> tuple[int, int]:
        """CPUs and GPUs that an actor reserves of what a node has; of nothing, the least."""
        cpus, gpus = (max(1, int(node.get(name, 0))) for name in ("CPU", "GPU"))
        if self._on_gpus:
            return self._cluster.cpus_per_node or 0, self._cluster.gpus_per_node or gpus
        return self._cluster.cpus_per_node or cpus, 0

    def _fits(self, node: Mapping[str, Any]) -> bool:
        there = (node["Resources"].get(name, 0) for name in ("CPU", "GPU"))
        return all(map(operator.ge, there, self._share({})))

    def _actor(self, share: tuple[int, int], **options: Any) -> Any:
        return self._ray.remote(num_cpus=share[0], num_gpus=share[1], **options)(Placed).remote()

    def _leave(self) -> None:
        if self._ray.is_initialized():
            for actor in (*(actor for actor, _ in self._actors.values()), *self._waiting):
                self._ray.kill(actor)
            if self._is_ours:
                self._ray.shutdown()
        self._actors.clear()
