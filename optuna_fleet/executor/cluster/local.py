"""The local cluster: one agent on this machine, no set-up."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from optuna_fleet.arguments import check_number
from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.executor.cluster.config import AgentConfig
from optuna_fleet.executor.cluster.devices import find_fleet
from optuna_fleet.executor.cluster.protocol import Options, Runner
from optuna_fleet.executor.fleet_runner import FleetRunner
from optuna_fleet.processes import ModuleProcess

_DEFAULTS = {
    # gloo would look up the machine's name, which need not resolve; one node needs no network.
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    # Threads that spin at barriers starve the other slots; where all fit, they lose little.
    "OMP_WAIT_POLICY": "PASSIVE",
    # The driver judges who hangs, and hears of errors from whoever raised them: torch's own
    # watchdog would abort the process first, and other trials' processes on the same store.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # A trial that resumes goes on bit for bit; has to be set before cuBLAS is first used.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}


class AgentProcess(ModuleProcess):
    """The agent as a child of the driver; it ends when its channel closes."""

    def __init__(self, config: AgentConfig) -> None:
        environment = {**_DEFAULTS, **os.environ, "OMP_NUM_THREADS": str(config.threads_per_slot)}
        super().__init__("optuna_fleet.executor.cluster.agent", config, environment=environment)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCluster:
    """The devices of this machine.

    Args:
        slots_per_device: Trainers on each device: several small trials may share a GPU.

    Raises:
        FleetConfigError: That is no number >= 1.
    """

    slots_per_device: int = 1

    def __post_init__(self) -> None:
        check_number("slots_per_device", self.slots_per_device, least=1, whole=True)

    def new_runner(self, options: Options) -> Runner:
        """See `Cluster`."""
        if not hasattr(os, "pidfd_open"):
            raise FleetConfigError(
                f"cluster='local' needs Linux 5.3 or later, but this is {sys.platform!r}; "
                "cluster='inline' runs everywhere."
            )
        fleet = find_fleet(options.devices, options.device_type, self.slots_per_device)
        return FleetRunner(options, fleet, AgentProcess)
