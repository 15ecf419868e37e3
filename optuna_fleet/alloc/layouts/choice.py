"""Which layout a trial gets: data parallel, or virtual workers, whichever is expected faster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from optuna_fleet.alloc.layouts.contention import partitions_under_load
from optuna_fleet.alloc.layouts.distribution import (
    Workers,
    equal_distribution,
    hybrid_distribution,
    node_partition,
)
from optuna_fleet.alloc.layouts.prediction import (
    data_parallel_rate,
    fits_on_each,
    flushed_rate,
    pipeline_rate,
)
from optuna_fleet.alloc.layouts.servers import Servers, can_be_local, sync_seconds
from optuna_fleet.alloc.partition import (
    DoesNotFit,
    Layers,
    Links,
    Memory,
    Partition,
    PartitionProblem,
    StageDevice,
    Versions,
)
from optuna_fleet.alloc.partition.alike import Shape, on_devices, shape_of
from optuna_fleet.alloc.partition.in_flight import partitions_by_in_flight


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutProblem:
    """A trial is to be laid out on all of some devices.

    Attributes:
        layers: What its layers cost, for one minibatch.
        devices: Those it gets.
        links: Ways between them.
        memory: What a stage takes.
        clock_distance: D between virtual workers; None if weights must be exact, so that
            pipelines are flushed and wait for each other.
        data_parallel_rate: Minibatches per second of data parallelism on these devices, where it
            is known; None to estimate it.
    """

    layers: Layers
    devices: tuple[StageDevice, ...]
    links: Links = field(default_factory=Links)
    memory: Memory = field(default_factory=Memory)
    clock_distance: int | None = 0
    data_parallel_rate: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Replicas x stages.

    Attributes:
        policy: "data parallel", "one pipeline", "NP", "ED", "HD" or "ED-local".
        workers: Stages of each virtual worker; empty for data parallelism on all devices.
        in_flight: Minibatches in flight in each virtual worker; 1 for data parallelism.
        minibatches_per_s: Expected, of all devices together.
        servers: Where parameters are.
        reason: One sentence for people.
    """

    policy: str
    workers: tuple[Partition, ...]
    in_flight: int
    minibatches_per_s: float
    servers: Servers = Servers.ROUND_ROBIN
    reason: str = ""


def best_layout(problem: LayoutProblem) -> Layout:
    """The layout that is expected to be fastest.

    Raises:
        DoesNotFit: There is none.
    """
    found = list(layouts(problem))
    if not found:
        raise DoesNotFit(
            f"No layout of {len(problem.layers)} layers on {len(problem.devices)} devices fits: "
            "neither the whole model on each, nor pipelines of them with one minibatch in flight. "
            "More devices or a smaller batch may help."
        )
    best = max(found, key=lambda layout: layout.minibatches_per_s)
    others = ", ".join(
        f"{layout.policy} {layout.minibatches_per_s:.3g}" for layout in found if layout is not best
    )
    unfit = "" if _fits_whole(problem) else "; the model does not fit on each device"
    return replace(
        best,
        reason=f"{best.policy} is expected to do {best.minibatches_per_s:.3g} minibatches/s"
        f" ({others or 'no other layout fits'}{unfit}).",
    )


def layouts(problem: LayoutProblem) -> Iterator[Layout]:
    """Every layout that fits, with as many minibatches in flight as make it fastest."""
    if _fits_whole(problem):
        rate = problem.data_parallel_rate
        yield Layout(
            policy="data parallel",
            workers=(),
            in_flight=1,
            minibatches_per_s=data_parallel_rate(problem.layers, problem.devices, problem.links)
            if rate is None
            else rate,
        )
    tried: set[Workers] = set()
    for policy, workers in _distributions(problem):
        if workers in tried:
            continue
        tried.add(workers)
        yield from _pipelines(problem, policy, workers)


def rate_of(
    problem: LayoutProblem, workers: Sequence[Partition], in_flight: int, servers: Servers
) -> float:
    """Minibatches per second expected of virtual workers; all have the pace of the slowest.

    A clock distance lets the fast ones run ahead for a while only.
    """
    syncs = [[0.0] * len(worker.stages) for worker in workers]
    if len(workers) > 1:
        pushes = sync_seconds(workers, problem.layers, problem.links, servers)
        syncs = [[2 * push_s / in_flight for push_s in worker] for worker in pushes]
    stage_s = [
        [stage.seconds + sync_s for stage, sync_s in zip(worker.stages, its_syncs, strict=True)]
        for worker, its_syncs in zip(workers, syncs, strict=True)
    ]
    rate = flushed_rate if problem.clock_distance is None else pipeline_rate
    return len(workers) * min(rate(times, in_flight) for times in stage_s)


def _distributions(problem: LayoutProblem) -> Iterator[tuple[str, Workers]]:
    speeds = {
        kind: 1 / (sum(problem.layers.forward_s[kind]) + sum(problem.layers.backward_s[kind]))
        for kind in {device.kind for device in problem.devices}
    }
    yield "one pipeline", (problem.devices,)
    yield "NP", node_partition(problem.devices)
    yield "ED", equal_distribution(problem.devices)
    yield "HD", hybrid_distribution(problem.devices, speeds)


def _pipelines(problem: LayoutProblem, policy: str, workers: Workers) -> Iterator[Layout]:
    if max(map(len, workers)) > len(problem.layers):
        return
    try:
        options = list(enumerate(_by_in_flight(problem, workers), start=1))
    except DoesNotFit:
        return
    for servers in Servers:
        rates = [
            (rate_of(problem, partitions, in_flight, servers), -in_flight)
            for in_flight, partitions in options
            if servers is Servers.ROUND_ROBIN or _is_local(partitions)
        ]
        if rates:
            yield _under_load(problem, policy, workers, -max(rates)[1], servers)


def _by_in_flight(problem: LayoutProblem, workers: Workers) -> Iterator[tuple[Partition, ...]]:
    """Partitions for 1, 2, ... minibatches in flight; N_m is the same in all (section 4)."""
    found: dict[Shape, tuple[Partition, ...]] = {}
    for on in _problems(problem, workers):
        if shape_of(on.devices) not in found:
            found[shape_of(on.devices)] = partitions_by_in_flight(on)
    for in_flight in range(min(map(len, found.values()))):
        yield tuple(on_devices(found[shape_of(ds)][in_flight], ds) for ds in workers)


def _under_load(
    problem: LayoutProblem, policy: str, workers: Workers, in_flight: int, servers: Servers
) -> Layout:
    """The same, now that the virtual workers are known to share the nodes' ports."""
    base = next(_problems(problem, workers))
    partitions = partitions_under_load(replace(base, in_flight=in_flight), workers)
    if servers is Servers.LOCAL and not can_be_local(partitions):
        servers = Servers.ROUND_ROBIN
    return Layout(
        policy=policy if servers is Servers.ROUND_ROBIN else f"{policy}-local",
        workers=partitions,
        in_flight=in_flight,
        minibatches_per_s=rate_of(problem, partitions, in_flight, servers),
        servers=servers,
    )


def _is_local(partitions: Sequence[Partition]) -> bool:
    return len(partitions) > 1 and can_be_local(partitions)


def _problems(problem: LayoutProblem, workers: Workers) -> Iterator[PartitionProblem]:
    memory = problem.memory
    if problem.clock_distance is None:
        memory = replace(memory, versions=Versions.NONE)
    elif len(workers) > 1:
        # Sums of own waves, to be added to what comes from the servers.
        memory = replace(memory, copies=memory.copies + problem.clock_distance + 3)
    for devices in workers:
        yield PartitionProblem(
            layers=problem.layers, devices=devices, links=problem.links, memory=memory
        )


def _fits_whole(problem: LayoutProblem) -> bool:
    return fits_on_each(problem.layers, problem.devices, problem.memory)
