"""The local cluster: one agent on this machine, no set-up."""

from __future__ import annotations

import os

from optuna_fleet.messages import AgentConfig
from optuna_fleet.processes import ModuleProcess

# gloo would look up the machine's name, which need not resolve; one node needs no network.
# Threads that spin at barriers starve the other slots; where all fit, they lose little.
_DEFAULTS = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "OMP_WAIT_POLICY": "PASSIVE",
}


class AgentProcess(ModuleProcess):
    """The agent as a child of the driver; it ends when its channel closes."""

    def __init__(self, config: AgentConfig) -> None:
        environment = {**_DEFAULTS, **os.environ, "OMP_NUM_THREADS": str(config.threads_per_slot)}
        super().__init__("optuna_fleet.executor.cluster.agent", config, environment=environment)
