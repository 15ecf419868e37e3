"""Slurm, inside an allocation: one srun starts an agent on each of its nodes."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from optuna_fleet.arguments import check_number
from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.executor.cluster.asking import TellsNews
from optuna_fleet.executor.cluster.engine import Network
from optuna_fleet.executor.cluster.protocol import Options, Runner
from optuna_fleet.executor.cluster.slurm.allocation import Allocation
from optuna_fleet.executor.cluster.slurm.commands import (
    agent_command,
    node_names,
    without_options,
)
from optuna_fleet.executor.fleet_runner import FleetRunner
from optuna_fleet.sampler_bridge.compat import fleet_logger
from optuna_fleet.wire.invitation import Invitation

_SAME_NOTICE_S = 1.0  # Slurm may signal the driver, and the batch script, which signals it too


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmCluster:
    """The nodes of the Slurm allocation in which the script runs.

    Each node offers the GPUs that Slurm has given to the job there, or, where it has given none,
    as many CPU slots as cores; `devices` of the executor says how many of each node.

    Args:
        slots_per_device: Trainers on each device: several small trials may share a GPU.
        notice_s: Seconds until the nodes are taken after a signal has announced that: SIGUSR1 or
            SIGTERM, of which Slurm, or the batch script for it, sends one.

    Raises:
        FleetConfigError: One of them is out of range.
    """

    slots_per_device: int = 1
    notice_s: float = 30.0

    def __post_init__(self) -> None:
        check_number("slots_per_device", self.slots_per_device, least=1, whole=True)
        check_number("notice_s", self.notice_s, least=0)

    def new_runner(self, options: Options) -> Runner:
        """See `Cluster`."""
        job = check_allocation(os.environ)
        agent = agent_command(
            options.devices, options.device_type, self.slots_per_device, self.notice_s
        )
        engine = SlurmEngine(job, agent, self.notice_s)
        return FleetRunner(options, engine, Network(host="", has_leases=True))


def check_allocation(environment: Mapping[str, str]) -> str:
    """The number of the job that this process is in.

    Raises:
        FleetConfigError: It is in none, or it is one of several alike.
    """
    job = environment.get("SLURM_JOB_ID", "")
    if not job or shutil.which("srun") is None:
        missing = "there is no `srun`" if job else "SLURM_JOB_ID is not set"
        raise FleetConfigError(
            f"cluster='slurm' needs a Slurm allocation, but {missing}: run the script in one "
            "(`optuna-fleet submit`, `sbatch`, `salloc`), or see HarvestCluster for pilot jobs."
        )
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if "SLURM_STEP_ID" in environment and tasks != "1":
        raise FleetConfigError(
            f"The script was started by an `srun` of {tasks} tasks, so there would be {tasks} "
            "drivers: start it without srun, or with `srun --nodes=1 --ntasks=1`."
        )
    return job


def hint_at_slurm(environment: Mapping[str, str]) -> None:
    """Say that there are more nodes than the one whose devices are to be used."""
    nodes = environment.get("SLURM_JOB_NUM_NODES", "1")
    if nodes != "1":
        fleet_logger.info(
            f"This Slurm job has {nodes} nodes, and cluster='local' uses one: cluster='slurm' "
            "uses all."
        )


class SlurmEngine(TellsNews):
    """Starts agents in the allocation that this process is in."""

    def __init__(self, job: str, agent: Sequence[str], notice_s: float) -> None:
        self._job = job
        self._agent = agent
        self._notice_s = notice_s
        self._allocation: Allocation | None = None
        self._handlers: dict[int, Any] = {}
        self._noticed_at: float | None = None

    def open(self, invitation: Invitation) -> None:
        """See `Engine`."""
        environment = {
            **without_options(os.environ),
            **invitation.environment(),
            "SLURM_JOB_ID": self._job,
        }
        nodes = node_names(os.environ.get("SLURM_JOB_NODELIST", ""))
        self._allocation = Allocation(self._job, self._agent, environment, nodes)
        self.news = self._allocation.news
        self._noticed_at = None
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGUSR1, signal.SIGTERM):
                if signal.getsignal(number) is signal.SIG_DFL:
                    self._handlers[number] = signal.signal(number, self._notice)

    def _notice(self, number: int, frame: FrameType | None) -> None:
        """Slurm, or the batch script, says that the job is to end; a later SIGTERM is meant."""
        now = time.monotonic()
        if self._noticed_at is None:
            self._noticed_at = now
            if self._allocation is not None:
                cause = f"job {self._job} got {signal.Signals(number).name}"
                self._allocation.end(cause, by=time.time() + self._notice_s)
        elif number == signal.SIGTERM and now - self._noticed_at > _SAME_NOTICE_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def expected(self) -> Iterable[str]:
        """See `Engine`."""
        return self._allocation.nodes if self._allocation else ()

    def end(self, node: str, *, for_good: bool = False) -> None:
        """See `Engine`: Slurm ends no single task of a step; agents end by their own leases."""
        if for_good and self._allocation:
            self._allocation.leave_out(node)

    def close(self) -> None:
        """See `Engine`."""
        if threading.current_thread() is threading.main_thread():
            while self._handlers:
                signal.signal(*self._handlers.popitem())
        if self._allocation is not None:
            self._allocation.close()
            self._allocation = None
