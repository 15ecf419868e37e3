"""What an agent is told before it can be told anything."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from optuna_fleet.executor.cluster.shares import cores_set_aside, pipeline_setup
from optuna_fleet.pipeline import SharedPipeline
from optuna_fleet.pipeline.spec import PipelineSetup
from optuna_fleet.resources import Device, Fleet, cpu_count


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """All an agent needs to know to start; travels over its standard input.

    The agent removes `private_folder` in the end: it outlives a driver that is killed. A
    preprocessor that works on one chunk for `stuck_s` seconds is killed.
    """

    node: int
    host: str
    port: int
    secret: bytes = field(repr=False)
    sys_path: tuple[str, ...]
    argv: tuple[str, ...]
    preload: tuple[str, ...]
    devices: tuple[Device, ...]
    threads_per_slot: int
    pipeline: PipelineSetup | None
    private_folder: str | None
    stuck_s: float | None = None


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
