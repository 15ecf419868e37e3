"""A Ray cluster of several nodes on this machine, where Ray is installed."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

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

    def remove(self, node: Any) -> None:
        """Take a node away, without notice."""
        self.cluster.remove_node(node, allow_graceful=False)


@contextlib.contextmanager
def ray_cluster(cpus: Sequence[int]) -> Iterator[RayNodes]:
    """Nodes with so many CPUs, the head first."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install 'optuna-fleet[ray]'")
    from ray.cluster_utils import Cluster

    head = {"num_cpus": cpus[0], "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for number in cpus[1:]:
            cluster.add_node(num_cpus=number)
        yield RayNodes(cluster)
    finally:
        cluster.shutdown()
