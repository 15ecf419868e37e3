"""Slurm, outside an allocation: pilot jobs of one node each, which come and go."""

from __future__ import annotations

import math
import os
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

from optuna_fleet.arguments import check_number, check_that, path
from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.executor.cluster.engine import Cluster, Engine
from optuna_fleet.executor.cluster.slurm.commands import agent_command
from optuna_fleet.executor.cluster.slurm.harvesting import HarvestEngine, PilotJob
from optuna_fleet.executor.cluster.slurm.pilots import PilotLimits
from optuna_fleet.executor.given import Options

_LONGEST_RENEWAL_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HarvestCluster(Cluster):
    """Nodes that Slurm has to spare: pilot jobs of one node each, which come and go.

    Trials move to nodes that come, and away from those that leave, with or without notice. The
    script runs where it lasts: on a login node, or in a small job of its own.

    Args:
        partition: Where pilots are submitted; None for the site's default. One for jobs that may
            be preempted gives most.
        max_nodes: Most pilots that wait and run; one about to end has a successor on top.
        time_limit_s: Of each pilot, rounded up to minutes; short ones fit into more gaps.
        gpus_per_node: To ask for with ``--gres``; None where nodes are given with all they have.
        exclusive: Ask for whole nodes; else several pilots may be on one.
        sbatch: More options of sbatch, as in ``"--account=abc --constraint=a100"``.
        slots_per_device: Trainers on each device: several small trials may share a GPU.
        notice_s: Seconds until a node is taken after Slurm has announced it (its ``GraceTime``).
        logs: Folder for what the pilots print, on a disk that all nodes share.

    Raises:
        FleetConfigError: One of them is out of range.
    """

    partition: str | None = None
    max_nodes: int = 32
    time_limit_s: float = 3600.0
    gpus_per_node: int | None = None
    exclusive: bool = True
    sbatch: str = ""
    slots_per_device: int = 1
    notice_s: float = 30.0
    logs: str | os.PathLike[str] = "optuna-fleet-pilots"

    def __post_init__(self) -> None:
        check_number("max_nodes", self.max_nodes, least=1, whole=True)
        check_number("time_limit_s", self.time_limit_s, least=60, most=1e8)
        check_number("gpus_per_node", self.gpus_per_node, least=1, whole=True, optional=True)
        check_number("slots_per_device", self.slots_per_device, least=1, whole=True)
        check_number("notice_s", self.notice_s, least=0)
        check_that(
            "sbatch",
            self.sbatch,
            lambda given: isinstance(given, str) and all(o[:1] == "-" for o in shlex.split(given)),
            "be options of sbatch, as in '--account=abc --constraint=a100'",
        )
        object.__setattr__(self, "logs", path("logs", self.logs))

    def engine(self, options: Options) -> Engine:
        """See `Cluster`."""
        if shutil.which("sbatch") is None:
            raise FleetConfigError(
                "HarvestCluster submits pilot jobs to Slurm, but there is no `sbatch` here: run "
                "the script on a login node of the cluster."
            )
        agent = agent_command(
            options.devices, options.device_type, self.slots_per_device, self.notice_s
        )
        job = PilotJob(agent=agent, options=self._options(), logs=Path(self.logs))
        limits = PilotLimits(
            most=self.max_nodes,
            renewal_s=min(self.time_limit_s / 4, _LONGEST_RENEWAL_S),
            shares_nodes=not self.exclusive,
        )
        return HarvestEngine(limits, job)

    def _options(self) -> list[str]:
        given = {
            "partition": self.partition,
            "time": math.ceil(self.time_limit_s / 60),
            "gres": f"gpu:{self.gpus_per_node}" if self.gpus_per_node else None,
        }
        named = [f"--{name}={value}" for name, value in given.items() if value is not None]
        return named + ["--exclusive"] * self.exclusive + shlex.split(self.sbatch)
