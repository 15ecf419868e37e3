"""What trials run on: devices, nodes, the fleet."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Device:
    """One device slot: the place of one trainer process.

    Attributes:
        index: Number of the slot in the whole fleet, from 0.
        node: Number of the node it is on, from 0.
        kind: Device type; rates are only comparable within one kind ("cpu", or a GPU's name).
        visible: What ``CUDA_VISIBLE_DEVICES`` must say for a process to see just this GPU; "" if
            it is none.
        node_name: Name of its node, for people.
    """

    index: int
    node: int
    kind: str
    visible: str = ""
    node_name: str = ""

    @property
    def type(self) -> str:
        """What PyTorch calls it."""
        return "cuda" if self.visible else "cpu"


def needs_gloo(devices: Iterable[Device], here: Container[int] = ()) -> bool:
    """Whether NCCL can't form a group: any two slots may be on one GPU, or some are on none.

    Slices of a GPU (MIG) are one GPU to NCCL, and do not say which they are of.

    Args:
        devices: Of the group.
        here: Nodes that are one machine, and share its GPUs.
    """
    slots = [(-1 if d.node in here else d.node, d.visible) for d in devices]
    if not all(visible for _, visible in slots):
        return True
    is_slice = (visible.startswith("MIG-") for _, visible in slots)
    return len(slots) > 1 and (len(set(slots)) < len(slots) or any(is_slice))


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
    """Return how many NVIDIA GPUs a process sees, without initialising CUDA.

    Args:
        environment: The process' environment.
        devices: The folder of this machine's devices.
    """
    there = len(list(devices.glob("nvidia[0-9]*")))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return there
    chosen = itertools.takewhile(_names_gpu, (name.strip() for name in visible.split(",")))
    return min(there, len(list(chosen)))


def _names_gpu(name: str) -> bool:
    """CUDA ends the list at the first that does not; "-1" means none."""
    return name.isdigit() or name.startswith(("GPU-", "MIG-"))
