"""The local cluster: one agent on this machine, no set-up."""

from __future__ import annotations

import os
import sys

from optuna_fleet.executor.cluster.config import AgentConfig
from optuna_fleet.executor.cluster.shares import cores_set_aside, pipeline_setup
from optuna_fleet.pipeline import SharedPipeline
from optuna_fleet.processes import ModuleProcess
from optuna_fleet.resources import Fleet, cpu_count

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


def modules_to_preload() -> tuple[str, ...]:
    """What the agent imports once for its children: torch, and what the script imported of it."""
    wanted = ("torchvision", "torchvision.transforms.v2", "torchvision.models")
    return (
        "torch",
        "torch._dynamo",  # which the first optimizer of each process imports: a second or more
        "optuna_fleet.trainer.training",
        "optuna_fleet.pipeline.preprocessor.main",
        *(name for name in wanted if name in sys.modules),
    )


def agent_config(
    fleet: Fleet,
    pipeline: SharedPipeline | None,
    *,
    address: tuple[str, int, bytes],
    preload: bool,
    private_folder: str | None,
    stuck_s: float | None,
) -> AgentConfig:
    """What the agent of this machine is told.

    Args:
        fleet: The devices.
        pipeline: The data.
        address: Host and port of the driver, and the secret that opens them.
        preload: Import torch once, for all trainers.
        private_folder: What it removes in the end.
        stuck_s: Seconds after which a preprocessor that works on one chunk is killed.
    """
    host, port, secret = address
    cores_left = cpu_count() - cores_set_aside(pipeline, fleet)
    return AgentConfig(
        node=0,
        host=host,
        port=port,
        secret=secret,
        sys_path=tuple(sys.path),
        argv=tuple(sys.argv),
        preload=modules_to_preload() if preload else (),
        devices=fleet.devices,
        threads_per_slot=max(1, cores_left // len(fleet)),
        pipeline=pipeline_setup(pipeline, fleet) if pipeline else None,
        stuck_s=stuck_s,
        private_folder=private_folder,
    )
