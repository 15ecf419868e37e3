"""A Ray cluster of several nodes on this machine, where Ray is installed."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from optuna_fleet import processes
from optuna_fleet.executor.cluster import ray as ray_adapter
from optuna_fleet.executor.cluster.ray import RayCluster, RayEngine
from tests.clusters.hub import AGENT


class RayNodes:
    """Nodes, each with a raylet of its own."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.address = cluster.address

    def engine(self, **options: Any) -> RayEngine:
        """An engine of stub agents on these nodes."""
        return RayEngine(RayCluster(address=self.address, **options), AGENT[1:], "cpu")

    def add(self, cpus: int) -> Any:
        """Another node."""
        return self.cluster.add_node(num_cpus=cpus)


@contextlib.contextmanager
def ray_cluster(cpus: Sequence[int]) -> Iterator[RayNodes]:
    """Nodes with so many CPUs, the head first."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install 'optuna-fleet[ray]'")
    from ray.cluster_utils import Cluster

    without = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus[0], **without})
    try:
        for number in cpus[1:]:
            cluster.add_node(num_cpus=number)
        with _actors_that_import_little():
            yield RayNodes(cluster)
    finally:
        cluster.shutdown()


@contextlib.contextmanager
def _actors_that_import_little() -> Iterator[None]:
    """What they run travels with them, else each imports all of the package for it."""
    from ray import cloudpickle

    for module in (ray_adapter, processes):
        cloudpickle.register_pickle_by_value(module)
    yield
    for module in (ray_adapter, processes):
        cloudpickle.unregister_pickle_by_value(module)
