"""The Ray cluster: nodes of a Ray cluster that is there, or of one that is started here."""

from __future__ import annotations

from dataclasses import dataclass

from optuna_fleet.arguments import check_number
from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.executor.cluster.engine import Network
from optuna_fleet.executor.cluster.protocol import Options, Runner
from optuna_fleet.executor.cluster.ray.actor import ray_module
from optuna_fleet.executor.cluster.ray.engine import RayEngine
from optuna_fleet.executor.fleet_runner import FleetRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class RayCluster:
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
        for name in ("num_nodes", "gpus_per_node", "cpus_per_node"):
            check_number(name, getattr(self, name), least=1, whole=True, optional=True)
        check_number("slots_per_device", self.slots_per_device, least=1, whole=True)
        ray_module()

    def new_runner(self, options: Options) -> Runner:
        """See `Cluster`."""
        if options.devices is not None:
            raise FleetConfigError(
                "With RayCluster the devices are those of its nodes: give gpus_per_node or "
                "cpus_per_node to RayCluster, not devices to the FleetExecutor."
            )
        slots = ("--slots-per-device", str(self.slots_per_device))
        engine = RayEngine(
            ("-m", "optuna_fleet.cli", "agent", *slots),
            address=self.address,
            num_nodes=self.num_nodes,
            cpus_per_node=self.cpus_per_node,
            gpus_per_node=self.gpus_per_node,
            device_type=options.device_type,
        )
        return FleetRunner(options, engine, Network(host="", has_leases=True, more_may_join=True))
