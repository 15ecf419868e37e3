"""How fast pipelines and data parallelism are expected to be."""

from __future__ import annotations

from collections.abc import Sequence

from optuna_fleet.alloc.partition import Layers, Links, Memory, StageDevice
from optuna_fleet.wsp.credits import held_minibatches


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


def flushed_rate(stage_s: Sequence[float], num_microbatches: int) -> float:
    """Microbatches per second of a pipeline that is flushed after so many.

    Where all stages take as long, this is GPipe's (m / (m + k - 1)) / t.
    """
    return num_microbatches / (sum(stage_s) + (num_microbatches - 1) * max(stage_s))


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


def data_parallel_rate(layers: Layers, devices: Sequence[StageDevice], links: Links) -> float:
    """Minibatches per second of all devices together, each with one of its own at a time.

    They wait for the slowest one, and nothing is sent while they compute, as measured with
    Horovod in the paper (Table 4).
    """
    slowest_s = max(
        sum(layers.forward_s[d.kind]) + sum(layers.backward_s[d.kind]) for d in devices
    )
    sync_s = all_reduce_s(sum(layers.parameter_bytes), devices, links)
    return len(devices) / (slowest_s + sync_s)
