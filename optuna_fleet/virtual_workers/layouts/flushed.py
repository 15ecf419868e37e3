"""How devices train batches that come in parts: each with the whole model, or a stage of it.

Weights change when all parts of a batch are through, so gradients are exact either way, and what
is expected to be faster is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from optuna_fleet.virtual_workers.layouts.prediction import all_reduce_s, fits_on_each
from optuna_fleet.virtual_workers.partition import (
    DoesNotFit,
    Layers,
    Links,
    Memory,
    Partition,
    PartitionProblem,
    StageDevice,
    best_partition,
)
from optuna_fleet.virtual_workers.wsp.turns import held_minibatches


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushedProblem:
    """A trial has these devices, and uses all of them.

    Attributes:
        layers: What its layers cost, for one part of a batch.
        devices: Those it has.
        num_parts: Parts of a batch.
        links: Ways between the devices.
        memory: What a stage takes.
        may_replicate: Whether each device may have the whole model.
        exchanged_bytes: What a pipeline sends at each flush, beside what goes from stage to stage.
    """

    layers: Layers
    devices: tuple[StageDevice, ...]
    num_parts: int
    links: Links = field(default_factory=Links)
    memory: Memory = field(default_factory=lambda: Memory(keeps_versions=False))
    may_replicate: bool = True
    exchanged_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushedLayout:
    """N x 1 or 1 x k.

    Attributes:
        shares: Parts of each replica, in the order of the devices; empty for a pipeline.
        partition: Stages of a pipeline; None for replicas.
        held: Parts that a stage has memory for between their two passes.
        batch_s: Seconds that a batch is expected to take.
        reason: One sentence for people.
    """

    shares: tuple[int, ...] = ()
    partition: Partition | None = None
    held: int = 1
    batch_s: float
    reason: str = ""


def best_flushed_layout(problem: FlushedProblem) -> FlushedLayout:
    """The layout that is expected to be faster.

    Raises:
        DoesNotFit: Neither fits.
    """
    num, (whole, why_not) = len(problem.devices), replicated(problem)
    try:
        stages = pipelined(problem)
    except DoesNotFit as error:
        if whole is None:
            raise
        return replace(whole, reason=f"{num} x 1, as there is no pipeline: {error}")
    if whole is None:
        return replace(stages, reason=f"1 x {num}, as {why_not}.")
    best = min((whole, stages), key=lambda layout: layout.batch_s)
    return replace(
        best,
        reason=f"{num} x 1 is expected to take {1e3 * whole.batch_s:.3g} ms for a batch, "
        f"1 x {num} {1e3 * stages.batch_s:.3g} ms.",
    )


def replicated(problem: FlushedProblem) -> tuple[FlushedLayout | None, str]:
    """Each device with the whole model and some of the parts; or None, and why not."""
    layers, devices = problem.layers, problem.devices
    if not problem.may_replicate:
        return None, "stages were asked for, or layers keep what they have seen"
    if len(devices) > problem.num_parts:
        return None, f"a batch has {problem.num_parts} parts"
    if not fits_on_each(layers, devices, problem.memory):
        return None, "the model does not fit on each device"
    part_s = [sum(layers.forward_s[d.kind]) + sum(layers.backward_s[d.kind]) for d in devices]
    shares = shares_of(part_s, problem.num_parts)
    slowest_s = max(share * one_s for share, one_s in zip(shares, part_s, strict=True))
    sync_s = all_reduce_s(sum(layers.parameter_bytes), devices, problem.links)
    return FlushedLayout(shares=shares, batch_s=slowest_s + sync_s), ""


def shares_of(part_s: Sequence[float], num_parts: int) -> tuple[int, ...]:
    """Parts of each device, at least one, so that the last one to end does so as early as can be.

    Args:
        part_s: Seconds that each device takes for a part.
        num_parts: At least as many as there are devices.
    """
    shares = [1] * len(part_s)
    for _ in range(num_parts - len(part_s)):
        ends_s = [(share + 1) * one_s for share, one_s in zip(shares, part_s, strict=True)]
        shares[ends_s.index(min(ends_s))] += 1
    return tuple(shares)


def pipelined(problem: FlushedProblem) -> FlushedLayout:
    """A stage on each device; where memory is short, stages may hold fewer parts at a time.

    Raises:
        DoesNotFit: The devices have too little memory, or are more than the layers.
    """
    num = len(problem.devices)
    if num > len(problem.layers):
        raise DoesNotFit(
            f"{num} devices are more than the {len(problem.layers)} stages that the model can be "
            "cut into."
        )
    freest, least_s = _pipeline(problem, held=1)
    found = [freest]
    # More than 2 k - 1 keep it no fuller.
    for held in (problem.num_parts, *range(min(problem.num_parts, 2 * num - 1) - 1, 1, -1)):
        with suppress(DoesNotFit):
            layout, slowest_s = _pipeline(problem, held)
            found.append(layout)
            if slowest_s <= least_s:
                break
    return min(found, key=lambda layout: layout.batch_s)


def _pipeline(problem: FlushedProblem, held: int) -> tuple[FlushedLayout, float]:
    """The best one whose stages hold so many parts, and the time of its slowest stage."""
    partition = best_partition(
        PartitionProblem(
            layers=problem.layers,
            devices=problem.devices,
            in_flight=held,
            links=problem.links,
            memory=problem.memory,
        )
    )
    stage_s = [stage.seconds for stage in partition.stages]
    exchange_s = all_reduce_s(problem.exchanged_bytes, problem.devices, problem.links)
    batch_s = flushed_s(stage_s, problem.num_parts, held) + exchange_s
    layout = FlushedLayout(partition=partition, held=held, batch_s=batch_s)
    return layout, partition.slowest_s


def flushed_s(stage_s: Sequence[float], num_parts: int, held: int) -> float:
    """Seconds of a pipeline for a batch of so many parts, from flush to flush.

    The first part takes the time of all stages. Each of the others follows as fast as the slowest
    stage is, or where memory is short, as parts come back to a stage that waits for them.
    """
    num = len(stage_s)
    limits = (sum(stage_s[q:]) / held_minibatches(q, num, held) for q in range(num))
    return sum(stage_s) + (num_parts - 1) * max(*stage_s, *limits)
