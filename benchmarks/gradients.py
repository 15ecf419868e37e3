"""A training step on two CPU ranks: our reducer beside ``DistributedDataParallel``.

python benchmarks/gradients.py                # three sizes of a perceptron
python benchmarks/gradients.py --rounds 40

Both train the same model on the same data by gloo, in turns, some steps each. A ratio is of the
medians of all turns: time per step with the reducer over that with DDP.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from optuna_fleet.trainer import groups
from optuna_fleet.trainer.gradients.reducer import Reducer
from optuna_fleet.trainer.gradients.weights import Share, Weights
from optuna_fleet.wire.messages import RunTrial
from optuna_fleet.wire.node_messages import ProcessId, StoreReady

BATCH, RANKS = 64, 2
WIDTHS = {64: 50, 512: 20, 2048: 3}
"""Of the perceptron, and how many steps a turn has."""


class Trained:
    """A perceptron, which one of the two keeps the same on all ranks."""

    def __init__(self, width: int, *, by_us: bool) -> None:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
        self.model: nn.Module = layers if by_us else DistributedDataParallel(layers)
        self.optimizer = torch.optim.SGD(layers.parameters(), lr=0.01)
        self.weights = Weights()
        self.x, self.y = torch.randn(BATCH // RANKS, width), torch.arange(BATCH // RANKS) % 10
        self.reducer: Reducer | None = None
        if by_us:
            self.reducer = Reducer(self.weights, lambda keys, text: None)
            self.reducer.watch(layers)

    def step(self) -> None:
        """One, as a loop over batches has it."""
        if self.reducer is not None:
            share = Share(BATCH // RANKS, BATCH)
            self.weights.hand_out(1, share, lockstep=True, trains=True)
        loss = nn.functional.cross_entropy(self.model(self.x), self.y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def seconds(self, num_steps: int) -> float:
        """Per step."""
        torch.distributed.barrier()
        began = time.perf_counter()
        for _ in range(num_steps):
            self.step()
        return (time.perf_counter() - began) / num_steps


def rank_of(rank: int, port: int, rounds: int) -> None:
    torch.set_num_threads(1)
    store = StoreReady(host="127.0.0.1", port=port, process=ProcessId("", 0))
    where = {"rank": rank, "world_size": RANKS, "group": "x", "store": store}
    groups.join_group(RunTrial(run_id=0, number=0, seed=0, maximize=None, **where), "cpu")
    for width, num_steps in WIDTHS.items():
        ours, ddp = Trained(width, by_us=True), Trained(width, by_us=False)
        turns = [(ours.seconds(num_steps), ddp.seconds(num_steps)) for _ in range(rounds + 2)][2:]
        own, theirs = (statistics.median(times) for times in zip(*turns, strict=True))
        if rank == 0:
            print(
                f"width {width}: {1e3 * own:.2f} ms per step, with DDP {1e3 * theirs:.2f}, "
                f"ratio {own / theirs:.2f}"
            )
    groups.leave_group()
    groups.wait_until_left()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    store, port = groups.serve_store()
    mp.spawn(rank_of, (port, rounds), RANKS)
    del store


if __name__ == "__main__":
    main()
