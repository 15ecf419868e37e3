"""Which clusters go by a name."""

from __future__ import annotations

import os

from optuna_fleet.arguments import check_choice
from optuna_fleet.executor.cluster.inline import InlineCluster
from optuna_fleet.executor.cluster.local import LocalCluster
from optuna_fleet.executor.cluster.protocol import Cluster
from optuna_fleet.executor.cluster.ray import RayCluster
from optuna_fleet.executor.cluster.slurm.cluster import SlurmCluster, hint_at_slurm

CLUSTERS: dict[str, type[Cluster]] = {
    "local": LocalCluster,
    "inline": InlineCluster,
    "slurm": SlurmCluster,
    "ray": RayCluster,
}


def cluster_of(given: str | Cluster) -> Cluster:
    """The cluster that a user named or made.

    Raises:
        FleetConfigError: It is neither.
    """
    if isinstance(given, Cluster) and not isinstance(given, type):
        return given
    check_choice("cluster", given, CLUSTERS)
    if given == "local":
        hint_at_slurm(os.environ)
    return CLUSTERS[str(given)]()
