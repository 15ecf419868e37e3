"""How fast pipelines are expected to be, and what exact data parallelism takes."""

from __future__ import annotations

from collections.abc import Sequence

from optuna_fleet.virtual_workers.layouts.servers import Servers, sync_seconds
from optuna_fleet.virtual_workers.partition import Layers, Links, Memory, Partition, StageDevice
from optuna_fleet.virtual_workers.wsp.turns import held_minibatches


def pipeline_rate(stage_s: Sequence[float], in_flight: int) -> float:
    """Minibatches per second of one virtual worker without flushes.

    A stage that holds at most f minibatches, which come back after the time of all stages from it
    on, ends at most f of them in that time; and no pipeline is faster than its slowest stage.

    Args:
        stage_s: Seconds of each stage for one minibatch, with its share of pushes and pulls.
        in_flight: Minibatches in flight, N_m.
    """
    num = len(stage_s)
    limits = (held_minibatches(q, num, in_flight) / sum(stage_s[q:]) for q in range(num))
    return min(1 / max(stage_s), *limits)


def waves_rate(
    workers: Sequence[Partition], layers: Layers, links: Links, in_flight: int, servers: Servers
) -> float:
    """Minibatches per second of virtual workers without flushes; all go as fast as the slowest.

    A clock distance lets the fast ones run ahead for a while only.

    Args:
        workers: The stages of each.
        layers: What their layers cost.
        links: Ways between the devices.
        in_flight: Minibatches in flight in each, which are a wave.
        servers: Where the parameters are.
    """
    syncs = [[0.0] * len(worker.stages) for worker in workers]
    if len(workers) > 1:
        pushes = sync_seconds(workers, layers, links, servers)
        syncs = [[2 * push_s / in_flight for push_s in worker] for worker in pushes]
    stage_s = [
        [stage.seconds + sync_s for stage, sync_s in zip(worker.stages, its_syncs, strict=True)]
        for worker, its_syncs in zip(workers, syncs, strict=True)
    ]
    return len(workers) * min(pipeline_rate(times, in_flight) for times in stage_s)


def fits_on_each(layers: Layers, devices: Sequence[StageDevice], memory: Memory) -> bool:
    """Whether every device has memory for the whole model, in one version, and a minibatch."""
    needed = memory.copies * sum(layers.parameter_bytes) + sum(layers.kept_bytes)
    return all(needed <= device.memory_bytes for device in devices)


def all_reduce_s(num_bytes: float, devices: Sequence[StageDevice], links: Links) -> float:
    """Seconds of a ring all-reduce; over the slower links if devices are on several nodes."""
    num = len(devices)
    if num == 1:
        return 0.0
    link = links.within if len({device.node for device in devices}) == 1 else links.between
    return 2 * (num - 1) * link.seconds(num_bytes / num)
