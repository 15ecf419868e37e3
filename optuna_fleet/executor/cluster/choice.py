"""Which clusters go by a name."""

from __future__ import annotations

from optuna_fleet.arguments import check_choice
from optuna_fleet.executor.cluster.inline import InlineCluster
from optuna_fleet.executor.cluster.local import LocalCluster
from optuna_fleet.executor.cluster.protocol import Cluster

CLUSTERS: dict[str, type[Cluster]] = {"local": LocalCluster, "inline": InlineCluster}


def cluster_of(given: str | Cluster) -> Cluster:
    """The cluster that a user named or made.

    Raises:
        FleetConfigError: It is neither.
    """
    if isinstance(given, Cluster) and not isinstance(given, type):
        return given
    check_choice("cluster", given, CLUSTERS)
    return CLUSTERS[str(given)]()
