"""What trials run on: devices, nodes, the fleet."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Device:
    """One device slot: the place of one trainer process.

    Attributes:
        index: Number of the slot in the whole fleet, from 0.
        node: Number of the node it is on, from 0.
        kind: Device type; rates are only comparable within one kind ("cpu", or a GPU's name).
        visible: What ``CUDA_VISIBLE_DEVICES`` must say for a process to see just this GPU.
    """

    index: int
    node: int
    kind: str
    visible: str = ""


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

    def __len__(self) -> int:
        return len(self.devices)
