"""HetPipe's published throughputs (Table 4, Figures 4 and 5) beside the simulator's.

python benchmarks/hetpipe.py            # about a minute on an idle core

Assumed: time goes with FLOP; devices are as fast as cores x clock say, calibrated on the published
single V. Horovod sends gradients as soon as the slowest device has them, beside the rest of the
backward pass; its rings are as fast as makes its published column come true (medians). What one
stage sends another is faster than a ring, by as much as makes HetPipe's one virtual worker on 4 V
come true (mean of both models), within nodes as between them; virtual workers on the same nodes
share their ports. One number was chosen with all of HetPipe's results in view: `--hidden`, the
share of pushes and pulls that devices do not stop for. The heights of the bars in Figures 4 and 5
are not in the paper's text: only what it says of them is compared.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from paper_models import BATCH_SIZE, SPEEDS, cluster, layers_of

from optuna_fleet.virtual_workers.layouts.contention import partitions_under_load
from optuna_fleet.virtual_workers.layouts.distribution import (
    Workers,
    equal_distribution,
    hybrid_distribution,
    node_partition,
)
from optuna_fleet.virtual_workers.layouts.servers import Servers, sync_seconds
from optuna_fleet.virtual_workers.partition import (
    Layers,
    Link,
    Links,
    Partition,
    PartitionProblem,
    StageDevice,
    best_partition,
    largest_in_flight,
)
from optuna_fleet.virtual_workers.simulator import StageTimes, VirtualWorkers, WorkersOutcome
from optuna_fleet.virtual_workers.wsp.schedules import WaveSynchronous

HOROVOD = {"VGG-19": (164, 205, 265, 339), "ResNet-152": (233, 353, 415, None)}
"""Horovod on 4, 8, 12, 16 devices (Table 4), images/s."""
HETPIPE = {"VGG-19": (300, 530, 572, 606), "ResNet-152": (256, 516, 538, 580)}
IN_FLIGHT = {"VGG-19": (5, 4, 5, 5), "ResNet-152": (5, 5, 6, 7)}
"""Published N_m: the total in Table 4 over its 1, 4, 4, 4 virtual workers."""
CLUSTERS = ("V", "VR", "VRQ", "VRGQ")
NUM_WAVES = 60
FAR_WAVES = 240
"""With which clock distances are compared: many times the distance."""


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
    for _ in range(40):
        middle = math.sqrt(slow * fast)
        if takes(Link(bytes_per_s=middle)) > seconds:
            slow = middle
        else:
            fast = middle
    return Link(bytes_per_s=fast)


def partitions(
    layers: Layers, workers: Workers, links: Links, in_flight: int
) -> tuple[Partition, ...]:
    problem = PartitionProblem(layers=layers, devices=workers[0], in_flight=in_flight, links=links)
    return partitions_under_load(problem, workers)


def most_in_flight(layers: Layers, workers: Workers, links: Links) -> int:
    return min(
        largest_in_flight(PartitionProblem(layers=layers, devices=devices, links=links))
        for devices in workers
    )


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


def table4(models: dict[str, Layers], links: Links, rings: Links, hidden: float) -> Iterator[str]:
    """HetPipe (ED-local) as whimpy devices are added."""
    yield "| Table 4 | devices | N_m | Horovod: published | simulated | ratio "
    yield "| HetPipe: published | simulated | ratio |\n|-|-|-|-|-|-|-|-|-|\n"
    for name, layers in models.items():
        for i, kinds in enumerate(CLUSTERS):
            devices = cluster(kinds)
            # One virtual worker on 4 devices, 4 on more, as published.
            workers = (devices,) if len(kinds) == 1 else equal_distribution(devices)
            in_flight = allowed(layers, workers, links, IN_FLIGHT[name][i])
            rate, _ = simulated(layers, workers, links, in_flight, Servers.LOCAL, hidden=hidden)
            published, horovod = HETPIPE[name][i], HOROVOD[name][i]
            ring = rings.within if len(kinds) == 1 else rings.between
            alike = len(devices) * BATCH_SIZE / horovod_s(layers, kinds, ring)
            told = (
                f"{horovod} | {alike:.0f} | {alike / horovod:.2f}"
                if horovod
                else "does not fit | |"
            )
            yield f"| {name} | {4 * len(kinds)} {kinds} | {in_flight} | {told} "
            yield f"| {published} | {rate:.0f} | {rate / published:.2f} |\n"


def figure5(models: dict[str, Layers], links: Links, hidden: float) -> Iterator[str]:
    """The policies on all 16 devices, D = 0, each at its best N_m up to 7."""
    devices = cluster("VRGQ")
    hybrid = hybrid_distribution(devices, SPEEDS)
    policies = {
        "NP": (node_partition(devices), Servers.ROUND_ROBIN),
        "HD": (hybrid, Servers.ROUND_ROBIN),
        "ED": (equal_distribution(devices), Servers.ROUND_ROBIN),
        "ED-local": (equal_distribution(devices), Servers.LOCAL),
    }
    yield "| Figure 5: images/s (N_m) | Horovod, published | " + " | ".join(policies) + " |\n"
    yield "|-|-|" + "-|" * len(policies) + "\n"
    for name, layers in models.items():
        horovod = HOROVOD[name][3] or HOROVOD[name][2]
        cells = []
        for workers, servers in policies.values():
            most = most_in_flight(layers, workers, links)
            options = (
                (simulated(layers, workers, links, m, servers, hidden=hidden)[0], -m)
                for m in range(1, most + 1)
            )
            rate, minus_in_flight = max(options)
            cells.append(f"{rate:.0f} ({-minus_in_flight})")
        yield f"| {name} | {horovod} | " + " | ".join(cells) + " |\n"


def figure4(models: dict[str, Layers], links: Links) -> Iterator[str]:
    """One virtual worker: throughput over that of N_m = 1."""
    yield "| Figure 4: one virtual worker | images/s, N_m = 1 | N_m = 2 .. 7, over N_m = 1 "
    yield "| busiest device, N_m = 1 | largest N_m |\n|-|-|-|-|-|\n"
    devices = cluster("VRGQ")
    kinds_of = [node_partition(devices), equal_distribution(devices)[:1]]
    kinds_of.append(hybrid_distribution(devices, SPEEDS)[::2])
    for name, layers in models.items():
        for worker in (worker for workers in kinds_of for worker in workers):
            rates, busiest = [], []
            for m in range(1, most_in_flight(layers, (worker,), links) + 1):
                rate, outcome = simulated(layers, (worker,), links, m, Servers.LOCAL)
                rates.append(rate)
                busiest.append(max(outcome.busy[0]))
            gains = " ".join(f"{rate / rates[0]:.2f}" for rate in rates[1:])
            kinds = "".join(device.kind for device in worker)
            yield f"| {name} {kinds} | {rates[0]:.0f} | {gains} "
            yield f"| {busiest[0]:.0%} | {busiest[-1]:.0%} |\n"


def distances(models: dict[str, Layers], links: Links, hidden: float) -> Iterator[str]:
    """What a clock distance does to equal virtual workers (section 8.4), and to unlike ones."""
    yield "| images/s (idle share of waiting) | D = 0 | 4 | 32 |\n|-|-|-|-|\n"
    devices = cluster("VRGQ")
    for name, layers in models.items():
        for policy, workers, servers in (
            ("ED-local", equal_distribution(devices), Servers.LOCAL),
            ("NP", node_partition(devices), Servers.ROUND_ROBIN),
        ):
            cells = []
            for distance in (0, 4, 32):
                rate, outcome = simulated(
                    layers,
                    workers,
                    links,
                    5,
                    servers,
                    hidden=hidden,
                    distance=distance,
                    num_waves=FAR_WAVES,
                )
                waited, idle = sum(outcome.waited_s), sum(outcome.idle_s)
                cells.append(f"{rate:.0f} ({idle / waited:.0%})" if waited else f"{rate:.0f} (-)")
            yield f"| {name} {policy} | " + " | ".join(cells) + " |\n"


def partitioner() -> Iterator[str]:
    """How long the search takes, on unlike devices of two nodes each."""
    yield "| partitioner: devices x layers | slowest of 5 instances, ms |\n|-|-|\n"
    for num_devices, num_layers in ((4, 150), (8, 50), (8, 150)):
        times = []
        for seed in range(5):
            problem = random_problem(seed, num_devices, num_layers)
            times.append(min(search_s(problem) for _ in range(5)))
        yield f"| {num_devices} x {num_layers} | {1e3 * max(times):.0f} |\n"


def search_s(problem: PartitionProblem) -> float:
    started = time.perf_counter()
    best_partition(problem)
    return time.perf_counter() - started


def random_problem(seed: int, num_devices: int, num_layers: int) -> PartitionProblem:
    """No two devices are equal, so that all orders differ."""
    rng = random.Random(seed)
    kinds = [str(i) for i in range(num_devices)]
    numbers = {name: [rng.uniform(1, 10) for _ in range(num_layers)] for name in ("t", "w", "a")}
    speeds = {kind: rng.uniform(0.3, 1) for kind in kinds}
    forward = {kind: tuple(t / speeds[kind] for t in numbers["t"]) for kind in kinds}
    return PartitionProblem(
        layers=Layers(
            forward_s=forward,
            backward_s=forward,
            cut_bytes=tuple(numbers["a"]),
            parameter_bytes=tuple(numbers["w"]),
            kept_bytes=tuple(numbers["a"]),
        ),
        devices=tuple(
            StageDevice(index=i, node=i // 2, kind=kind, memory_bytes=60.0 * num_layers)
            for i, kind in enumerate(kinds)
        ),
        in_flight=4,
        links=Links(within=Link(bytes_per_s=10.0), between=Link(bytes_per_s=3.0)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=float, default=0.4)
    hidden = parser.parse_args().hidden
    models = {name: layers_of(name) for name in HETPIPE}
    rings = fitted_rings(models)
    links = fitted_links(models, rings)
    for name, ways in (("Rings", rings), ("Stages", links)):
        within, between = (link.bytes_per_s / 1e9 for link in (ways.within, ways.between))
        print(f"{name}: {within:.2f} GB/s within a node, {between:.2f} GB/s between nodes.\n")
    for table in (
        table4(models, links, rings, hidden),
        figure5(models, links, hidden),
        figure4(models, links),
        distances(models, links, hidden),
        partitioner(),
    ):
        print("".join(table))


if __name__ == "__main__":
    main()
