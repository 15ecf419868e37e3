"""What an agent is started with, and what the driver tells it once it has joined."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from optuna_fleet.executor.cluster.cores import cores_set_aside, pipeline_setup
from optuna_fleet.pipeline import SharedPipeline
from optuna_fleet.pipeline.packed import PackedPipeline, PipelineSetup
from optuna_fleet.resources import Device
from optuna_fleet.wire.invitation import Invitation
from optuna_fleet.wire.node_messages import AgentJoining


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """What an agent is started with.

    Attributes:
        invitation: Whom it joins.
        node: Name of its node.
        devices: How many it offers; None for all.
        device_type: "cuda", "cpu", or None for "cuda" where there are GPUs.
        slots_per_device: Trainers on each device.
        kind: What its devices are said to be; None for what they are.
        cores: How many cores it may use; None for all that its process may.
        is_child: The driver has started it, and says what became of it.
        notice_s: Seconds that the node is left after a SIGTERM; None if that ends the agent.
    """

    invitation: Invitation
    node: str
    devices: int | None = None
    device_type: str | None = None
    slots_per_device: int = 1
    kind: str | None = None
    cores: int | None = None
    is_child: bool = True
    notice_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSetup:
    """The driver's answer to `AgentJoining`: what the node is to be.

    Attributes:
        devices: Its devices, under their numbers in the fleet.
        sys_path: Where the script's imports are found.
        argv: The script's arguments.
        cwd: The script's working directory.
        needed: What of these is there on the driver's machine.
        preload: Modules to import once for all trainers.
        threads_per_slot: What each trainer may compute with.
        pipeline: The data; None without.
        private_folder: What the agent removes in the end, if the driver is dead.
        driver_pid: Process id of the driver, if it is on this machine.
        stuck_s: Seconds after which a preprocessor that works on one chunk is killed.
        silence_s: Seconds without a word from the driver after which it ends; None for no limit.
    """

    devices: tuple[Device, ...]
    sys_path: tuple[str, ...]
    argv: tuple[str, ...]
    cwd: str
    needed: tuple[str, ...]
    preload: tuple[str, ...]
    threads_per_slot: int
    pipeline: PipelineSetup | None
    private_folder: str | None = None
    driver_pid: int | None = None
    stuck_s: float | None = None
    silence_s: float | None = None


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


def machine() -> str:
    """What tells whether two processes see the same process ids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


class NodeSetups:
    """Makes what nodes are told that join a fleet, and packs the data sets for the first of them.

    Args:
        pipeline: The data; None without.
        preload: Whether to import torch once for all trainers.
        private_folder: See `NodeSetup`, as of the following.
        stuck_s: Likewise.
        silence_s: Likewise.
    """

    def __init__(
        self,
        pipeline: SharedPipeline | None,
        *,
        preload: bool,
        private_folder: str | None,
        stuck_s: float | None,
        silence_s: float | None,
    ) -> None:
        self._pipeline = pipeline
        self._packed: PackedPipeline | None = None
        self._preload = preload
        self._private_folder = private_folder
        self._stuck_s = stuck_s
        self._silence_s = silence_s

    def of(self, node: AgentJoining, devices: tuple[Device, ...]) -> NodeSetup:
        """Returns what a node is told that joins with these devices."""
        is_here = node.machine == machine()
        cores_left = node.cores - cores_set_aside(self._pipeline, devices, node.cores)
        return NodeSetup(
            devices=devices,
            sys_path=tuple(sys.path),
            argv=tuple(sys.argv),
            cwd=(cwd := os.getcwd()),
            needed=tuple(path for path in (cwd, *sys.path) if path and os.path.exists(path)),
            preload=modules_to_preload() if self._preload else (),
            threads_per_slot=max(1, cores_left // len(devices)),
            pipeline=self._pipeline_setup(devices, node.cores, is_here=is_here),
            private_folder=self._private_folder if is_here else None,
            driver_pid=os.getpid() if is_here else None,
            stuck_s=self._stuck_s,
            silence_s=self._silence_s,
        )

    def _pipeline_setup(
        self, devices: tuple[Device, ...], cores: int, *, is_here: bool
    ) -> PipelineSetup | None:
        if self._pipeline is None:
            return None
        self._packed = self._packed or self._pipeline.packed()
        setup = pipeline_setup(self._packed, devices, cores)
        return setup if is_here else replace(setup, payload=None)

    def data_sets(self) -> str | None:
        """Returns the path of the file with the data sets, for nodes that do not see it."""
        return None if self._packed is None else self._packed.payload.path

    def close(self) -> None:
        """Lets go of the data sets."""
        self._packed = None
