"""What pushing a wave to the parameter servers takes, by where these are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from enum import Enum

from optuna_fleet.virtual_workers.partition import Layers, Links, Partition, Stage


class Servers(Enum):
    """Where parameter servers are.

    Attributes:
        ROUND_ROBIN: Layer by layer on the nodes in turn (the paper's default).
        LOCAL: Those of a stage on the stage's node (ED-local); for virtual workers whose stages
            are cut alike and are on the same nodes.
    """

    ROUND_ROBIN = "round-robin"
    LOCAL = "local"


def can_be_local(workers: Sequence[Partition]) -> bool:
    """Whether every virtual worker has the same layers on the same nodes."""
    shapes = {tuple((s.device.node, s.first, s.end) for s in worker.stages) for worker in workers}
    return len(shapes) == 1


def sync_seconds(
    workers: Sequence[Partition], layers: Layers, links: Links, servers: Servers
) -> tuple[tuple[float, ...], ...]:
    """Seconds that each stage of each virtual worker takes to push a wave; a pull takes as long.

    All push at once. What a node sends to others, and what a server gets from others, goes through
    one port each, which serves its senders in turn: a stage with b bytes waits for at most b of
    each other one's.

    Args:
        workers: The stages of each virtual worker.
        layers: Whose parameters are pushed.
        links: Ways within a node and between nodes.
        servers: Where they are.

    Raises:
        ValueError: Servers can't be local to these virtual workers.
    """
    if servers is Servers.LOCAL and not can_be_local(workers):
        raise ValueError(
            "The value of `servers` is LOCAL, but the virtual workers have layers on unlike nodes."
        )
    nodes = sorted({stage.device.node for worker in workers for stage in worker.stages})
    flows = [[_flows(stage, layers, nodes, servers) for stage in w.stages] for w in workers]
    ports: dict[tuple[str, int], list[float]] = defaultdict(list)
    for worker, its_flows in zip(workers, flows, strict=True):
        for stage, flow in zip(worker.stages, its_flows, strict=True):
            for port, size in _through(stage, flow).items():
                ports[port].append(size)

    def seconds(stage: Stage, flow: dict[int, float]) -> float:
        own = links.within.seconds(flow[stage.device.node]) if flow[stage.device.node] else 0.0
        queued = (
            links.between.seconds(sum(min(size, other) for other in ports[port]))
            for port, size in _through(stage, flow).items()
        )
        return max(own, *queued, 0.0)

    return tuple(
        tuple(map(seconds, worker.stages, its_flows))
        for worker, its_flows in zip(workers, flows, strict=True)
    )


def _flows(
    stage: Stage, layers: Layers, nodes: Sequence[int], servers: Servers
) -> dict[int, float]:
    """Node of the server -> bytes of the stage's parameters there."""
    found = dict.fromkeys(nodes, 0.0)
    for layer in range(stage.first, stage.end):
        is_local = servers is Servers.LOCAL
        node = stage.device.node if is_local else nodes[layer % len(nodes)]
        found[node] += layers.parameter_bytes[layer]
    return found


def _through(stage: Stage, flow: dict[int, float]) -> dict[tuple[str, int], float]:
    """Bytes through the ports of nodes: out of the stage's own, and into those of servers."""
    remote = {node: size for node, size in flow.items() if size and node != stage.device.node}
    if not remote:
        return {}
    into = {("in", node): size for node, size in remote.items()}
    return {("out", stage.device.node): sum(remote.values()), **into}
