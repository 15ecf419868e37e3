"""What agents take of the nodes of a Ray cluster, as `ray.nodes` describes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """CPUs and GPUs; an agent without GPUs has a slot on each CPU."""

    cpus: int
    gpus: int

    def arguments(self) -> list[str]:
        """What tells an agent of it."""
        if self.gpus:
            return ["--device-type", "cuda"]
        return ["--device-type", "cpu", "--devices", str(self.cpus)]

    def __str__(self) -> str:
        return f"{self.gpus} GPUs and {self.cpus} CPUs" if self.gpus else f"{self.cpus} CPUs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What agents are to have.

    Attributes:
        cpus: Of each node; None for all without GPUs, none with them.
        gpus: Of each node; None for all.
        on_gpus: Whether a node without GPUs is of no use.
    """

    cpus: int | None
    gpus: int | None
    on_gpus: bool

    def least(self) -> Share:
        """What a node must have."""
        if self.on_gpus:
            return Share(cpus=self.cpus or 0, gpus=self.gpus or 1)
        return Share(cpus=self.cpus or 1, gpus=0)

    def share(self, node: Mapping[str, Any]) -> Share | None:
        """What an agent takes of a node; None if the node has less than the least."""
        least, whole = self.least(), resources_of(node)
        if whole.cpus < least.cpus or whole.gpus < least.gpus:
            return None
        if self.on_gpus:
            return Share(cpus=least.cpus, gpus=self.gpus or whole.gpus)
        return Share(cpus=self.cpus or whole.cpus, gpus=0)


def claim_of(
    cpus: int | None, gpus: int | None, device_type: str | None, nodes: Iterable[Mapping[str, Any]]
) -> Claim:
    """The claim that a user has made; without a device type it is on GPUs where there are any."""
    has_gpus = bool(gpus) or any(resources_of(node).gpus for node in nodes)
    return Claim(
        cpus=cpus, gpus=gpus, on_gpus=has_gpus if device_type is None else device_type == "cuda"
    )


def resources_of(node: Mapping[str, Any]) -> Share:
    """All that a node has."""
    resources = node["Resources"]
    return Share(cpus=int(resources.get("CPU", 0)), gpus=int(resources.get("GPU", 0)))


def by_name(nodes: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Those that are there, by names that no two of them share."""
    return {
        f"{node['NodeManagerHostname']}-{node['NodeID'][:8]}": node
        for node in nodes
        if node["Alive"]
    }
