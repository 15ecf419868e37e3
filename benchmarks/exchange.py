"""``peak(n)`` of Pittman et al. (SC18, Fig. 8): samples per second that each of n nodes can get.

Every node is an agent in a network namespace of its own on this machine, with two preprocessors
and one reader that only counts; chunks travel in TLS. A sample takes a fixed time that costs no
CPU (a sleep), so that nodes do not take each other's cores. Schemes take turns within each n.
One JSON line per run, with what the formula predicts from what one node reaches alone, and the CPU
that each node's processes took, readers left out: that of sharing, as making a sample takes none.

    python benchmarks/exchange.py [--rounds 3] [--mbit-per-s 100] [--nodes 2 3 4]
    python benchmarks/exchange.py --quick   # three nodes, few samples; for trying out
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from optuna_fleet.pipeline import SharedPipeline
from optuna_fleet.pipeline.exchange import SCHEMES, Scheme

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "pipeline"))
sys.path.insert(0, str(Path(__file__).parents[1]))
from exchange_harness import Node, agree
from network_namespaces import Switch
from pipeline_harness import Forked

from benchmarks.pairing import tree_cpu_s
from benchmarks.papers.peak import Measured, peak

SAMPLE_S = 5e-3
SHAPE = (3, 96, 96)
SAMPLE_BYTES = torch.Size(SHAPE).numel()
CHUNK_SAMPLES = 16
BATCH_SIZE = 32
FAST_LINK_BYTES_PER_S = 1e9


class Sleeping:
    """Each sample takes as long, and no CPU."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(SAMPLE_S)
        return torch.full(SHAPE, index % 256, dtype=torch.uint8)


def read(client: Any) -> tuple[float, float]:
    """Returns when the first epoch was over, and when the third."""
    over = []
    for epoch in range(3):
        for _ in client.read("train", epoch=epoch, batch_size=BATCH_SIZE, continues=epoch < 2):
            pass
        over.append(time.monotonic())
    return over[0], over[2]


def run(num_nodes: int, scheme: Scheme, link: float | None, *, num_samples: int) -> dict[str, Any]:
    """Runs one sweep of nodes; called in a process of its own."""
    switch = Switch(num_nodes, link)
    pipeline = SharedPipeline(train=Sleeping(num_samples))
    options = {"num_preprocessors": 2, "chunk_bytes": CHUNK_SAMPLES * SAMPLE_BYTES}
    with contextlib.closing(switch), contextlib.ExitStack() as stack:
        nodes = []
        for number in range(num_nodes):
            host = Switch.address(number)
            start = partial(Node, pipeline, f"node {number}", host=host, **options)
            nodes.append(switch.at(number, start))
            stack.callback(nodes[-1].close)
        makers = frozenset(node.peer.agent for node in nodes[: math.ceil(num_nodes / 2)])
        agree(nodes, scheme, makers=makers)
        before = [tree_cpu_s(node.pid) for node in nodes]
        readers = [Forked(partial(read, node.client())) for node in nodes]
        times = [reader.result() for reader in readers]
        stats = [node.stats() for node in nodes]
        cpu_s = [tree_cpu_s(node.pid) - b for node, b in zip(nodes, before, strict=True)]
    begin, end = max(t for t, _ in times), max(t for _, t in times)
    return {
        "nodes": num_nodes,
        "scheme": scheme,
        "mbit_per_s": link,
        "samples_per_s": round(2 * num_samples / (end - begin), 1),
        "preprocessed_per_sample": round(sum(s.preprocessed for s in stats) / num_samples / 3, 2),
        "cpu_s": [round(seconds, 2) for seconds in cpu_s],
    }


def predicted(record: dict[str, Any], alone: float) -> float:
    """What the formula says, from what one node reaches by itself."""
    n, link = record["nodes"], record["mbit_per_s"]
    counts = {"single-broadcast": 1, "multi-broadcast": math.ceil(n / 2)}
    measured = Measured(
        num_nodes=n,
        samples_per_s=alone,
        sample_bytes=SAMPLE_BYTES,
        bytes_per_s=link * 125_000 if link else FAST_LINK_BYTES_PER_S,
    )
    return round(peak(record["scheme"], counts.get(record["scheme"], n), measured), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--mbit-per-s", type=float, default=100.0, help="of the limited link")
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--quick", action="store_true", help="three nodes, few samples")
    arguments = parser.parse_args()
    links: list[float | None] = [None, arguments.mbit_per_s]
    num_samples = 1536
    if arguments.quick:
        arguments.nodes, links, num_samples = [3], [None], 128
    measure = partial(run, num_samples=num_samples)
    alone = Forked(partial(measure, 1, "local", None)).result()["samples_per_s"]
    for _ in range(arguments.rounds):
        for n in arguments.nodes:
            for link in links:
                for scheme in SCHEMES:
                    record = Forked(partial(measure, n, scheme, link)).result()
                    record["predicted"] = predicted(record, alone)
                    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
