"""``peak(n)`` of Pittman et al. (SC18, Fig. 8): samples per second that each of n nodes can get.

Every node is an agent in a network namespace of its own on this machine, with one preprocessor and
one reader that only counts. A sample takes a fixed time that costs no CPU (a sleep), so that nodes
do not take each other's cores: the numbers show the exchange, not this machine's decoder. Schemes
take turns within each n. One JSON line per run, with what the cost model predicts.

    python benchmarks/exchange.py [--rounds 1] [--mbit-per-s 100]
    python benchmarks/exchange.py --quick   # two nodes, few samples; for trying out
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from optuna_fleet.pipeline import SharedPipeline
from optuna_fleet.pipeline.exchange.cost import Measured, peak

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "pipeline"))
from exchange_harness import config, free_port
from network_namespaces import Switch
from pipeline_harness import Agent, Forked

DECODE_S = 2.5e-3
SHAPE = (3, 96, 96)
NUM_SAMPLES = 384
CHUNK_SAMPLES = 16
BATCH_SIZE = 32
LANES = 4
FAST_LINK_BYTES_PER_S = 1e9


class Sleeping:
    """Each sample takes as long, and no CPU."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(DECODE_S)
        return torch.full(SHAPE, index % 256, dtype=torch.uint8)


def sample_bytes() -> int:
    return torch.Size(SHAPE).numel()


def read(client: Any) -> tuple[float, float]:
    """Returns when the first epoch was over, and when the third."""
    over = []
    for epoch in range(3):
        for _ in client.read("train", epoch=epoch, batch_size=BATCH_SIZE, continues=epoch < 2):
            pass
        over.append(time.monotonic())
    return over[0], over[2]


def run(
    num_nodes: int, scheme: str, mbit_per_s: float | None, *, num_samples: int
) -> dict[str, Any]:
    """Runs one sweep of nodes; called in a process of its own."""
    switch = Switch(num_nodes, mbit_per_s)
    port = free_port()
    p = max(1, num_nodes // 2) if "broadcast" in scheme else None
    pipeline = SharedPipeline(train=Sleeping(num_samples))
    options = {"num_preprocessors": 1, "chunk_bytes": CHUNK_SAMPLES * sample_bytes()}
    with contextlib.closing(switch), contextlib.ExitStack() as stack:
        agents = []
        for node in range(num_nodes):
            exchange = config(
                node,
                num_nodes,
                port,
                host=Switch.address(0),
                scheme=scheme,
                num_preprocessor_nodes=p,
                num_lanes=LANES,
            )
            start = partial(Agent, pipeline, exchange=exchange, **options)
            agents.append(switch.at(node, start))
            stack.callback(agents[-1].close)
        readers = [Forked(partial(read, agent.client())) for agent in agents]
        times = [reader.result() for reader in readers]
        stats = [agent.stats() for agent in agents]
        status = agents[0].exchange()[1]
    begin, end = max(t for t, _ in times), max(t for _, t in times)
    return {
        "nodes": num_nodes,
        "scheme": scheme,
        "preprocessor_nodes": p,
        "mbit_per_s": mbit_per_s,
        "samples_per_s": round(2 * num_samples / (end - begin), 1),
        "preprocessed_per_sample": sum(s.preprocessed for s in stats) / num_samples / 3,
        "status": status,
    }


def predicted(record: dict[str, Any], alone: float) -> float | None:
    """What the cost model says, from what one node reaches by itself."""
    if record["scheme"] == "auto":
        return None
    n, link = record["nodes"], record["mbit_per_s"]
    exchange = config(
        0, n, 1, scheme=record["scheme"], num_preprocessor_nodes=record["preprocessor_nodes"]
    )
    measured = Measured(
        samples_per_s=(alone,) * n,
        sample_bytes=sample_bytes(),
        chunk_samples=CHUNK_SAMPLES,
        bytes_per_s=link * 125_000 if link else FAST_LINK_BYTES_PER_S,
        latency_s=1e-3,
        num_lanes=LANES,
    )
    return round(peak(exchange.first_plan(), measured), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--mbit-per-s", type=float, default=100.0, help="of the limited link")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 3, 4, 6])
    parser.add_argument("--quick", action="store_true", help="two nodes, two schemes, few samples")
    arguments = parser.parse_args()
    links: list[float | None] = [None, arguments.mbit_per_s]
    schemes = ["self", "all-shared", "single-broadcast", "multi-broadcast", "auto"]
    num_samples = NUM_SAMPLES
    if arguments.quick:
        arguments.nodes, links, schemes, num_samples = [2], [None], schemes[:2], 64
    measure = partial(run, num_samples=num_samples)
    alone = Forked(partial(measure, 1, "self", None)).result()["samples_per_s"]
    for _ in range(arguments.rounds):
        for n in arguments.nodes:
            for link in links:
                for scheme in schemes if n > 1 else schemes[:1]:
                    record = Forked(partial(measure, n, scheme, link)).result()
                    record["predicted"] = predicted(record, alone)
                    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
