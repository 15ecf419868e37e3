"""What an agent is started with, and what the driver tells it once it has joined.

Also how trainers and preprocessors share the cores of a node.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from optuna_fleet.accelerator import ACCELERATORS
from optuna_fleet.pipeline import SharedPipeline
from optuna_fleet.pipeline.limits import NICENESS, default_preprocessors, most_preprocessors
from optuna_fleet.pipeline.preprocessor.payload import PipelineSetup
from optuna_fleet.resources import Device
from optuna_fleet.settings import Workplace, workplace_here
from optuna_fleet.wire.invitation import Invitation
from optuna_fleet.wire.node_messages import AgentJoining

_ENVIRONMENT = {
    # Threads that spin at barriers starve the other slots; where all fit, they lose little.
    "OMP_WAIT_POLICY": "PASSIVE",
    **{name: value for each in ACCELERATORS for name, value in each.environment.items()},
}
_ALWAYS = {name: value for each in ACCELERATORS for name, value in each.always.items()}


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
        workplace: Where the script is at work.
        needed: Folders of that which are there on the driver's machine.
        preload: Modules to import once for all trainers.
        threads_per_slot: What each trainer may compute with.
        pipeline: The data; None without.
        private_folder: What the agent removes in the end, if the driver is dead.
        driver_pid: Process id of the driver, if it is on this machine.
        stuck_s: Seconds after which a preprocessor that works on one chunk is killed.
        silence_s: Seconds without a word from the driver after which it ends; None for no limit.
    """

    devices: tuple[Device, ...]
    workplace: Workplace
    needed: tuple[str, ...]
    preload: tuple[str, ...]
    threads_per_slot: int
    pipeline: PipelineSetup | None
    private_folder: str | None = None
    driver_pid: int | None = None
    stuck_s: float | None = None
    silence_s: float | None = None


def environment(threads: int, given: Mapping[str, str]) -> dict[str, str]:
    """Variables that an agent needs before it imports anything; what was `given` mostly stays.

    Each of its trainers may compute with so many threads.
    """
    return {**_ENVIRONMENT, **given, **_ALWAYS, "OMP_NUM_THREADS": str(threads)}


def versions() -> dict[str, str]:
    """What has to be alike on all nodes of a fleet."""
    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "optuna-fleet": _version_of("optuna-fleet"),
        "torch": _version_of("torch"),
    }


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:  # run from its sources
        return "?"


def modules_to_preload() -> tuple[str, ...]:
    """What the agent imports once for its children: torch, and what the script imported of it."""
    wanted = ("torchvision", "torchvision.transforms.v2", "torchvision.models")
    return (
        "torch",
        "torch._dynamo",  # which the first optimizer of each process imports: a second or more
        "optuna_fleet.executor.fleet_executor",  # which the objective's module may import
        "optuna_fleet.trainer.training",
        "optuna_fleet.pipeline.preprocessor.preprocessor",
        *(name for name in wanted if name in sys.modules),
    )


def machine() -> str:
    """What tells whether two processes see the same process ids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


@dataclass(slots=True, kw_only=True)
class NodeSetups:
    """What nodes are told that join a fleet; packs the data sets for the first of them."""

    pipeline: SharedPipeline | None = None
    setup: bytes = b""
    preload: bool = False
    private_folder: str | None = None
    stuck_s: float | None = None
    silence_s: float | None = None
    _packed: PipelineSetup | None = None

    def of(self, node: AgentJoining, devices: tuple[Device, ...]) -> NodeSetup:
        """Returns what a node is told that joins with these devices."""
        is_here, workplace = node.machine == machine(), workplace_here()
        folders = (workplace.folder, *workplace.sys_path)
        cores_left = node.cores - cores_set_aside(self.pipeline, devices, node.cores)
        return NodeSetup(
            devices=devices,
            workplace=workplace,
            needed=tuple(path for path in folders if path and os.path.exists(path)),
            preload=modules_to_preload() if self.preload else (),
            threads_per_slot=max(1, cores_left // len(devices)),
            pipeline=self._pipeline_setup(devices, node.cores, is_here=is_here),
            private_folder=self.private_folder if is_here else None,
            driver_pid=os.getpid() if is_here else None,
            stuck_s=self.stuck_s,
            silence_s=self.silence_s,
        )

    def _pipeline_setup(
        self, devices: tuple[Device, ...], cores: int, *, is_here: bool
    ) -> PipelineSetup | None:
        if self.pipeline is None:
            return None
        self._packed = self._packed or self.pipeline.packed()
        setup = pipeline_setup(self._packed, devices, cores)
        setup = replace(setup, settings=replace(setup.settings, setup=self.setup))
        return setup if is_here else replace(setup, payload=None)

    def data_sets(self) -> str | None:
        """Returns the path of the file with the data sets, for nodes that do not see it."""
        if self._packed is None or self._packed.payload is None:
            return None
        return self._packed.payload.path

    def close(self) -> None:
        """Lets go of the data sets."""
        self._packed = None


def pipeline_setup(
    pipeline: PipelineSetup, devices: Sequence[Device], cores: int
) -> PipelineSetup:
    """What the agent of a node with these devices and cores is to know of the pipeline."""
    cpu_slots = _has_cpu_slots(devices)
    return pipeline.setup(
        most_preprocessors(cores, num_slots=len(devices), cpu_slots=cpu_slots),
        is_adaptive=True,
        niceness=NICENESS if cpu_slots else 0,
        finish_on_device=not cpu_slots,
        num_slots=len(devices),
    )


def cores_set_aside(pipeline: SharedPipeline | None, devices: Sequence[Device], cores: int) -> int:
    """For preprocessors; there may be more of them, where that does not slow down trials."""
    if pipeline is None:
        return 0
    default = default_preprocessors(cores, cpu_slots=_has_cpu_slots(devices))
    return pipeline.num_preprocessors or default


def _has_cpu_slots(devices: Sequence[Device]) -> bool:
    return devices[0].type == "cpu"
