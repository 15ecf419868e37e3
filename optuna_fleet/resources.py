"""What trials run on: devices, nodes, the fleet."""

from __future__ import annotations

import contextlib
import math
import os
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from optuna_fleet.accelerator import ACCELERATORS, accelerator_of


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Device:
    """One device slot: the place of one trainer process.

    Attributes:
        index: Number of the slot in the whole fleet, from 0.
        node: Number of the node it is on, from 0.
        kind: Device type; rates are only comparable within one kind ("cpu", or a GPU's name).
        visible: What its accelerator's variable must say for a process to see just this one; ""
            if it is none.
        node_name: Name of its node, for people.
        accelerator: What PyTorch calls it, if it is none of a CPU.
    """

    index: int
    node: int
    kind: str
    visible: str = ""
    node_name: str = ""
    accelerator: str = ACCELERATORS[0].type

    @property
    def type(self) -> str:
        """What PyTorch calls it."""
        return self.accelerator if self.visible else "cpu"


def needs_gloo(devices: Iterable[Device], here: Container[int] = ()) -> bool:
    """Whether only gloo can form a group: any two slots may be on one GPU, or of unlike types.

    Slices of a GPU (MIG) are one GPU to its backend, and do not say which they are of.

    Args:
        devices: Of the group.
        here: Nodes that are one machine, and share its GPUs.
    """
    chosen = list(devices)
    types = {device.type for device in chosen}
    if len(types) > 1 or "cpu" in types:
        return True
    slots = {(-1 if d.node in here else d.node, d.visible) for d in chosen}
    is_slice = (d.visible.startswith(accelerator_of(d.type).slices) for d in chosen)
    return len(chosen) > 1 and (len(slots) < len(chosen) or any(is_slice))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """All device slots of an executor, in order of ``Device.index``."""

    devices: tuple[Device, ...]

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """Device indices of each node, for nodes in ascending order."""
        by_node: dict[int, list[int]] = {}
        for device in self.devices:
            by_node.setdefault(device.node, []).append(device.index)
        return tuple(tuple(by_node[node]) for node in sorted(by_node))

    @property
    def kinds(self) -> tuple[str, ...]:
        """Device types, in ascending order."""
        return tuple(sorted({device.kind for device in self.devices}))

    @property
    def widest(self) -> int:
        """Most devices of one type."""
        return max(Counter(device.kind for device in self.devices).values())

    def __len__(self) -> int:
        return len(self.devices)


def cpu_count() -> int:
    """Return how many cores this process may use: by affinity, container's quota, Slurm's word."""
    cores = [len(os.sched_getaffinity(0))]
    with contextlib.suppress(OSError, ValueError):  # no cgroup v2, or "max"
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores.append(max(1, math.ceil(int(quota) / int(period))))
    with contextlib.suppress(KeyError, ValueError):  # few sites let affinity say it
        cores.append(int(os.environ["SLURM_CPUS_ON_NODE"]))
    return min(cores)


def num_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """Return how many GPUs a process sees, without initialising them.

    Args:
        environment: The process' environment.
        devices: The folder of this machine's devices.
    """
    return sum(each.number(environment, devices) for each in ACCELERATORS)
