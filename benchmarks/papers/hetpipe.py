"""HetPipe (ATC'20): Table 4, Figures 4 to 7, sections 8.3, 8.4 and 9.

Assumed: time goes with FLOP; devices are as fast as cores x clock say, calibrated on the published
single V. Horovod sends gradients as soon as the slowest device has them, beside the rest of the
backward pass; its rings are as fast as makes its published column come true (medians). What one
stage sends another is faster than a ring, by as much as makes HetPipe's one virtual worker on 4 V
come true (mean of both models), within nodes as between them; virtual workers on the same nodes
share their ports. One number was chosen with all of HetPipe's results in view: `HIDDEN`, the
share of pushes and pulls that devices do not stop for. The heights of the bars in Figures 4 and 5
are not in the paper's text: only what it says of them is compared.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import accumulate, pairwise, permutations
from pathlib import Path

from benchmarks.papers.models import BATCH_SIZE, SPEEDS, cluster, layers_of
from benchmarks.papers.rows import Row, Span, Table, at_least, at_most
from benchmarks.papers.simulator import StageTimes, VirtualWorkers, WorkersOutcome
from optuna_fleet.virtual_workers.layouts import (
    Servers,
    Workers,
    equal_distribution,
    hybrid_distribution,
    node_partition,
    partitions_under_load,
    sync_seconds,
)
from optuna_fleet.virtual_workers.partition import (
    DoesNotFit,
    Layers,
    Link,
    Links,
    Partition,
    PartitionProblem,
    StageDevice,
    best_partition,
    partition_of,
)
from optuna_fleet.virtual_workers.wsp import WaveSynchronous

TITLE = "HetPipe"
ABOUT = (
    "Park et al., ATC'20. Simulated, with speeds and links calibrated on the single V, on "
    "Horovod's column and on one virtual worker of Table 4: its agreement is partly built in. "
    "Nothing ran on GPUs."
)

HOROVOD = {"VGG-19": (164, 205, 265, 339), "ResNet-152": (233, 353, 415, None)}
"""Horovod on 4, 8, 12, 16 devices (Table 4), images/s."""
HETPIPE = {"VGG-19": (300, 530, 572, 606), "ResNet-152": (256, 516, 538, 580)}
IN_FLIGHT = {"VGG-19": (5, 4, 5, 5), "ResNet-152": (5, 5, 6, 7)}
"""Published N_m: the total in Table 4 over its 1, 4, 4, 4 virtual workers."""
CLUSTERS = ("V", "VR", "VRQ", "VRGQ")
NUM_WAVES = 60
FAR_WAVES = 240
"""With which clock distances are compared: many times the distance."""
HIDDEN = 0.4
SIMILAR: Span = (0.9, 1.1)

_CUTS = "which layers were cut where, and the links' true speeds, aren't published"
_DATA = "needs ImageNet"
_FITTED = (
    "Links were fitted to Horovod's rows and to those of HetPipe on 4 V; the other rows follow "
    "from them, and from `HIDDEN`."
)
PIPEDREAM = 158
"""Images/s of ResNet-152 on all 16 devices (section 9)."""
REPLICAS = (4, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1)
"""Devices of each of its stages."""

Models = dict[str, Layers]


def tables(quick: bool, folder: Path | None = None) -> Iterator[Table]:
    """All of them; fewer minibatches in flight are tried if quick, and no clock distances."""
    models = {name: layers_of(name) for name in HETPIPE}
    rings = fitted_rings(models)
    links = fitted_links(models, rings)
    rows = tuple(table4(models, links, rings))
    yield Table(title="Table 4: images/s", rows=rows, note=_FITTED)
    rows = tuple(figure5(models, links, at_best=not quick))
    yield Table(title="Figure 5: ways to make virtual workers", rows=rows)
    yield Table(title="Section 8.3: what crosses nodes", rows=tuple(traffic(models, links)))
    rows = tuple(beside_pipedream(models["ResNet-152"], links, rings))
    yield Table(title="Section 9: PipeDream", rows=rows)
    if quick:
        return
    yield Table(title="Figure 4: one virtual worker", rows=tuple(figure4(models, links)))
    yield Table(
        title="Figures 6 and 7, 8.4: clock distances", rows=tuple(distances(models, links))
    )


def horovod_s(layers: Layers, kinds: str, ring: Link) -> float:
    """Seconds of a step on 4 of each of `kinds`: an all-reduce beside the backward pass."""
    num, slowest = 4 * len(kinds), min(kinds, key=SPEEDS.__getitem__)
    computed_s = sent_s = sum(layers.forward_s[slowest])
    backward = zip(layers.backward_s[slowest], layers.parameter_bytes, strict=True)
    for layer_s, num_bytes in reversed(list(backward)):
        computed_s += layer_s
        sent_s = max(sent_s, computed_s) + ring.seconds(2 * (num - 1) / num * num_bytes)
    return sent_s


def fitted_rings(models: dict[str, Layers]) -> Links:
    """Of Horovod: the medians of what explains each of its published throughputs."""
    within, between = [], []
    for name, layers in models.items():
        for kinds, rate in zip(CLUSTERS, HOROVOD[name], strict=True):
            if rate is not None:
                step_s = partial(horovod_s, layers, kinds)
                found = link_for(4 * len(kinds) * BATCH_SIZE / rate, step_s)
                (within if len(kinds) == 1 else between).append(found.bytes_per_s)
    return Links(
        within=Link(bytes_per_s=statistics.median(within)),
        between=Link(bytes_per_s=statistics.median(between)),
    )


def fitted_links(models: dict[str, Layers], rings: Links) -> Links:
    """From stage to stage."""
    within = statistics.mean(
        link_for(BATCH_SIZE / HETPIPE[name][0], partial(on_four_s, name, layers)).bytes_per_s
        for name, layers in models.items()
    )
    faster = within / rings.within.bytes_per_s
    return Links(
        within=Link(bytes_per_s=within),
        between=Link(bytes_per_s=faster * rings.between.bytes_per_s),
    )


def on_four_s(name: str, layers: Layers, within: Link) -> float:
    """Seconds of a minibatch of one virtual worker on 4 V, as in Table 4."""
    workers, links = (cluster("V"),), Links(within=within)
    rate, _ = simulated(layers, workers, links, IN_FLIGHT[name][0], Servers.LOCAL)
    return BATCH_SIZE / rate


def link_for(seconds: float, takes: Callable[[Link], float]) -> Link:
    """With which something takes so long."""
    slow, fast = 1e8, 1e11
    for _ in range(24):  # to some millionths
        middle = math.sqrt(slow * fast)
        if takes(Link(bytes_per_s=middle)) > seconds:
            slow = middle
        else:
            fast = middle
    return Link(bytes_per_s=fast)


def partitions(
    layers: Layers, workers: Workers, links: Links, in_flight: int
) -> tuple[Partition, ...]:
    problem = _problem(layers, workers[0], links, in_flight)
    return partitions_under_load(problem, workers)


def _problem(
    layers: Layers, devices: tuple[StageDevice, ...], links: Links, in_flight: int
) -> PartitionProblem:
    """With weights, gradients, and versions of the weights."""
    return PartitionProblem(
        layers=layers, devices=devices, in_flight=in_flight, links=links, copies=2 + in_flight
    )


def most_in_flight(layers: Layers, workers: Workers, links: Links) -> int:
    """For which some partition fits (section 4: Max_m); more than 2k - 1 are of no use."""

    def fit(in_flight: int) -> bool:
        with suppress(DoesNotFit):
            for devices in workers:
                best_partition(_problem(layers, devices, links, in_flight))
            return True
        return False

    most = 2 * min(map(len, workers)) - 1
    return next((n for n in range(1, most + 1) if not fit(n)), most + 1) - 1


def simulated(
    layers: Layers,
    workers: Workers,
    links: Links,
    in_flight: int,
    servers: Servers,
    *,
    hidden: float = 0.0,
    distance: int = 0,
    num_waves: int = NUM_WAVES,
) -> tuple[float, WorkersOutcome]:
    """Images per second of all virtual workers."""
    made = partitions(layers, workers, links, in_flight)
    syncs: Sequence[Sequence[float]] = [[0.0] * len(worker.stages) for worker in made]
    if len(made) > 1:
        syncs = sync_seconds(made, layers, links, servers)
    times = [
        [
            StageTimes(forward_s=s.forward_s, backward_s=s.backward_s, push_s=sync, pull_s=sync)
            for s, sync in zip(worker.stages, its_syncs, strict=True)
        ]
        for worker, its_syncs in zip(made, syncs, strict=True)
    ]
    schedule = WaveSynchronous(in_flight, distance)
    outcome = VirtualWorkers(times, schedule, hidden=hidden).run(num_waves)
    return outcome.minibatches_per_s * BATCH_SIZE, outcome


def allowed(layers: Layers, workers: Workers, links: Links, in_flight: int) -> int:
    """So many minibatches in flight as the simulator has memory for."""
    most = most_in_flight(layers, workers, links)
    takes_no_more = 2 * max(map(len, workers)) - 1  # a larger wave takes no more memory
    return in_flight if most == takes_no_more else min(most, in_flight)


def table4(models: Models, links: Links, rings: Links) -> Iterator[Row]:
    """HetPipe (ED-local) as whimpy devices are added."""
    rates: dict[str, list[float]] = {}
    for name, layers in models.items():
        for kinds, horovod in zip(CLUSTERS, HOROVOD[name], strict=True):
            ring = rings.within if len(kinds) == 1 else rings.between
            yield Row(
                place="Table 4",
                what=f"Horovod, {name}, {4 * len(kinds)} {kinds}",
                paper=horovod or "does not fit",
                ours=horovod and 4 * len(kinds) * BATCH_SIZE / horovod_s(layers, kinds, ring),
                unit="images/s",
                tolerance=0.2,
                why=_CUTS if horovod else "does not fit",
            )
        rates[name] = [on_cluster(name, layers, links, i) for i in range(len(CLUSTERS))]
        for kinds, published, rate in zip(CLUSTERS, HETPIPE[name], rates[name], strict=True):
            yield Row(
                place="Table 4",
                what=f"HetPipe, {name}, {4 * len(kinds)} {kinds}",
                paper=published,
                ours=rate,
                unit="images/s",
                tolerance=0.2,
                why=_CUTS,
            )
    yield Row(
        place="8.3",
        what="most that whimpy devices add, 16 / 4 devices",
        paper=2.3,
        ours=max(its[-1] / its[0] for its in rates.values()),
        unit="x",
        why=_CUTS,
    )


def on_cluster(name: str, layers: Layers, links: Links, i: int) -> float:
    """Images per second on one of `CLUSTERS`: one virtual worker on 4 devices, 4 on more."""
    devices = cluster(CLUSTERS[i])
    workers = (devices,) if len(CLUSTERS[i]) == 1 else equal_distribution(devices)
    in_flight = allowed(layers, workers, links, IN_FLIGHT[name][i])
    return simulated(layers, workers, links, in_flight, Servers.LOCAL, hidden=HIDDEN)[0]


def figure5(models: Models, links: Links, *, at_best: bool) -> Iterator[Row]:
    """The policies on all 16 devices, D = 0, over Horovod, at the best of all N_m or of two."""
    for name, layers in models.items():
        horovod = HOROVOD[name][3] or HOROVOD[name][2] or 0
        rates = {
            policy: rate / horovod
            for policy, rate in by_policy(layers, links, at_best=at_best).items()
        }
        is_large = name == "VGG-19"
        for policy in ("NP", "ED", "HD"):
            low = policy == "NP" or is_large
            words = "below" if low else "a bit better or similar"
            yield Row(
                place="Fig. 5",
                what=f"{name}, {policy} / Horovod: {words}",
                paper=at_most(1.0) if low else (0.9, 1.2),
                ours=rates[policy],
                unit="x",
                why=_CUTS,
            )
        yield Row(
            place="Fig. 5",
            what=f"{name}, ED-local / Horovod",
            paper=1.8 if is_large else 1.4,
            ours=rates["ED-local"],
            unit="x",
            tolerance=0.15,
            why=_CUTS,
        )
        yield Row(
            place="Fig. 5",
            what=f"{name}, ED-local / the best of the others",
            paper=at_least(1.0),
            ours=rates["ED-local"] / max(rates[policy] for policy in ("NP", "ED", "HD")),
            unit="x",
            why=_CUTS,
        )


def by_policy(layers: Layers, links: Links, *, at_best: bool) -> dict[str, float]:
    """Images per second on all 16 devices."""
    devices = cluster("VRGQ")
    policies = {
        "NP": (node_partition(devices), Servers.ROUND_ROBIN),
        "HD": (hybrid_distribution(devices, SPEEDS), Servers.ROUND_ROBIN),
        "ED": (equal_distribution(devices), Servers.ROUND_ROBIN),
        "ED-local": (equal_distribution(devices), Servers.LOCAL),
    }
    return {
        policy: max(
            simulated(layers, workers, links, m, servers, hidden=HIDDEN)[0]
            for m in _to_try(most_in_flight(layers, workers, links), at_best)
        )
        for policy, (workers, servers) in policies.items()
    }


def _to_try(most: int, at_best: bool) -> Iterable[int]:
    return range(1, most + 1) if at_best else {min(5, most), most}


def traffic(models: Models, links: Links) -> Iterator[Row]:
    """MiB between nodes for a minibatch: of a ring, and of pipelines across all nodes."""
    for name, num_devices, horovod, local in (
        ("VGG-19", 16, 515, 103),
        ("ResNet-152", 12, 211, 298),
    ):
        layers = models[name]
        ring = sum(layers.parameter_bytes) * (num_devices - 1) / num_devices
        workers = equal_distribution(cluster("VRGQ"))
        in_flight = allowed(layers, workers, links, IN_FLIGHT[name][3])
        made = partitions(layers, workers, links, in_flight)[0]
        cut = 2 * sum(layers.cut_bytes[end - 1] for end in made.cuts)
        for what, paper, ours in (("Horovod", horovod, ring), ("ED-local", local, cut)):
            yield Row(
                place="8.3",
                what=f"{name}, {what}",
                paper=paper,
                ours=ours / 2**20,
                unit="MiB",
                why="other layers were cut there, which aren't published",
            )


def beside_pipedream(layers: Layers, links: Links, rings: Links) -> Iterator[Row]:
    """One pipeline of many stages, beside HetPipe on the same 16 devices."""
    found = pipedream(layers, links, rings)
    yield Row(
        place="9",
        what="PipeDream, ResNet-152, 16 VRGQ",
        paper=PIPEDREAM,
        ours=found,
        unit="images/s",
        tolerance=0.2,
        why="simulated with HetPipe's links, and in any order of the nodes. There it was another "
        "framework (PyTorch), and some orders had too little memory: both are candidates",
    )
    yield Row(
        place="9",
        what="HetPipe / PipeDream: faster",
        paper=at_least(1.0),
        ours=on_cluster("ResNet-152", layers, links, 3) / found,
        unit="x",
        why=_CUTS,
    )


def pipedream(layers: Layers, links: Links, rings: Links) -> float:
    """Images per second, in the best order of the nodes, of stages cut as on alike devices.

    Minibatches take turns on a stage's devices, which add up their gradients by a ring.
    """
    cost = [f + b for f, b in zip(layers.forward_s["V"], layers.backward_s["V"], strict=True)]
    cuts = _balanced(cost)
    sizes = [sum(layers.parameter_bytes[a:b]) for a, b in pairwise((0, *cuts, len(cost)))]
    firsts = [0, *accumulate(REPLICAS[:-1])]
    found = []
    for order in permutations("VRGQ"):
        devices = cluster("".join(order))
        stages = tuple(devices[k] for k in firsts)
        problem = PartitionProblem(layers=layers, devices=stages, links=links)
        made = zip(partition_of(problem, stages, cuts).stages, sizes, REPLICAS, strict=True)
        slowest_s = max(
            (stage.seconds + rings.within.seconds(2 * (num - 1) / num * size)) / num
            for stage, size, num in made
        )
        found.append(BATCH_SIZE / slowest_s)
    return max(found)


def _balanced(cost: Sequence[float]) -> tuple[int, ...]:
    """Where to cut, so that no stage takes much longer on its devices than others."""

    @cache
    def best(stage: int, first: int) -> tuple[float, tuple[int, ...]]:
        if stage + 1 == len(REPLICAS):
            return sum(cost[first:]) / REPLICAS[stage], ()
        ends = range(first + 1, len(cost) - len(REPLICAS) + stage + 2)
        rest = {end: best(stage + 1, end) for end in ends}
        return min(
            (max(sum(cost[first:end]) / REPLICAS[stage], seconds), (end, *cuts))
            for end, (seconds, cuts) in rest.items()
        )

    return best(0, 0)[1]


def figure4(models: Models, links: Links) -> Iterator[Row]:
    """One virtual worker: throughput at its largest N_m over that of N_m = 1."""
    devices = cluster("VRGQ")
    kinds_of = [node_partition(devices), equal_distribution(devices)[:1]]
    kinds_of.append(hybrid_distribution(devices, SPEEDS)[::2])
    for name, layers in models.items():
        for worker in (worker for workers in kinds_of for worker in workers):
            most = most_in_flight(layers, (worker,), links)
            naive, full = (
                simulated(layers, (worker,), links, m, Servers.LOCAL)[0] for m in (1, most)
            )
            yield Row(
                place="Fig. 4, 8.2",
                what=f"{name}, {''.join(device.kind for device in worker)}: N_m = {most} / 1",
                paper=at_least(1.0),
                ours=full / naive,
                unit="x",
                why=_CUTS,
            )


def distances(models: Models, links: Links) -> Iterator[Row]:
    """What a clock distance does to equal virtual workers (ED-local)."""
    for place, what, paper in (
        ("Fig. 6", "ResNet-152: converges sooner than Horovod, 12 devices", "35 %"),
        ("Fig. 6", "ResNet-152: converges sooner than Horovod, 16 devices", "39 %"),
        ("Fig. 7", "VGG-19: converges sooner than Horovod, D = 0; 4", "29 %; 49 %"),
        ("8.4", "VGG-19: D = 32 converges later than D = 4", "4.7 %"),
    ):
        yield Row(place=place, what=what, paper=paper, why=_DATA)
    workers = equal_distribution(cluster("VRGQ"))
    for name, layers in models.items():
        rates, waits, idle = zip(
            *(far(layers, workers, links, d) for d in (0, 4, 32)), strict=True
        )
        yield Row(
            place="8.4",
            what=f"{name}: images/s, D = 4 / D = 0: less is waited for",
            paper=at_least(1.0),
            ours=rates[1] / rates[0],
            unit="x",
            why=_CUTS,
        )
        yield Row(
            place="8.4",
            what=f"{name}: images/s, D = 32 / D = 4: similar",
            paper=SIMILAR,
            ours=rates[2] / rates[1],
            unit="x",
            why=_CUTS,
        )
        yield Row(
            place="8.4",
            what=f"{name}: waiting, D = 4 / D = 0",
            paper=62.0,
            ours=100 * waits[1] / waits[0] if waits[0] else None,
            unit="%",
            why="here equal virtual workers are equally fast, so none waits with D = 4",
        )
        yield Row(
            place="8.4",
            what=f"{name}: idle, of the time that is waited, D = 0",
            paper=18.0,
            ours=100 * idle[0] / waits[0] if waits[0] else None,
            unit="%",
            tolerance=0.2,
            why="with these speeds its minibatches in flight fill the wait, or more of it",
        )


def far(
    layers: Layers, workers: Workers, links: Links, distance: int
) -> tuple[float, float, float]:
    """Images per second, and seconds waited and idle."""
    rate, outcome = simulated(
        layers,
        workers,
        links,
        5,
        Servers.LOCAL,
        hidden=HIDDEN,
        distance=distance,
        num_waves=FAR_WAVES,
    )
    return rate, sum(outcome.waited_s), sum(outcome.idle_s)
