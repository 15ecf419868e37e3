"""What the processes of a `RankPool` do. Every job joins a group of its own and leaves it."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from optuna_fleet.exceptions import TrainerLostError
from optuna_fleet.trainer import groups
from optuna_fleet.trainer.checkpoints import checkpoint
from optuna_fleet.trainer.gradients import collectives
from optuna_fleet.trainer.gradients.reducer import Reducer
from optuna_fleet.trainer.gradients.weights import Share, Weights
from optuna_fleet.trainer.groups import GroupSpec
from optuna_fleet.trainer.randomness import rng_state


@contextmanager
def group(spec: GroupSpec, timeout_s: float = 30.0) -> Iterator[None]:
    groups.join_group(spec, "gloo", timeout_s)
    try:
        yield
    finally:
        groups.leave_group()


def batches(num: int, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [
        (
            torch.randn(size, 2, 7, 7, generator=generator, dtype=torch.float64) * 3 + 5,
            torch.randint(3, (size,), generator=generator),
        )
        for _ in range(num)
    ]


def shard(x: torch.Tensor, weights: Weights) -> torch.Tensor:
    """This rank's part; a copy of a sample of the batch, spoilt, where there is none."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    size = groups.group_size()
    part = x.tensor_split(size)[rank]
    weights.present = Share(len(part), len(x))
    if len(part):
        return part
    return torch.full_like(x[:1], torch.nan) if x.is_floating_point() else x[:1]


def ranks_sum(spec: GroupSpec) -> tuple[int, float]:
    with group(spec):
        value = torch.tensor([float(spec.rank + 1)])
        dist.all_reduce(value)
        return dist.get_world_size(), value.item()


def resources(spec: GroupSpec, repeats: int) -> list[tuple[int, int, bool]]:
    """Open files and threads, and whether the excepthook is as before, after each group."""
    seen, own = [], sys.excepthook  # on Python 3.10 it may be that of the exceptiongroup package
    for repeat in range(repeats):
        one = GroupSpec(
            rank=spec.rank,
            world_size=spec.world_size,
            prefix=f"{spec.prefix}-{repeat}",
            store_host=spec.store_host,
            store_port=spec.store_port,
        )
        with group(one):
            if hasattr(dist.ProcessGroup, "shutdown"):  # before torch 2.7 it leaves files open
                dist.barrier()
        groups.wait_until_left()
        hook = sys.excepthook is own
        seen.append((len(os.listdir("/proc/self/fd")), threading.active_count(), hook))
    return seen


def part_ways(spec: GroupSpec) -> tuple[list[float], bool]:
    """Begin what the other rank never does; what two groups have in common after that.

    And whether the first one is still being left then.
    """
    sums = []
    for repeat in range(3):
        one = replace(spec, prefix=f"{spec.prefix}-{repeat}")
        with group(one, 200.0):
            if repeat == 0:
                dist.broadcast(torch.ones(1), src=1 - spec.rank, async_op=True)
                continue
            sums.append(collectives.all_reduce_sum(1.0))
    return sums, any(thread.is_alive() for thread in groups._leaving)


def join_in_vain(spec: GroupSpec) -> None:
    with suppress(TrainerLostError), group(spec, 0.1):
        raise AssertionError("there is nobody else")


def join_late(spec: GroupSpec, folder: str) -> bool:
    """Whether rank 1, which is the last to join, has done so when the group is there."""
    mark, begin = Path(folder, "joined"), dist.init_process_group

    def begin_slowly(*args: Any, **options: Any) -> None:
        begin(*args, **options)
        time.sleep(0.2)
        mark.touch()

    if spec.rank == 1:
        dist.init_process_group = begin_slowly
    try:
        with group(spec):
            return mark.exists()
    finally:
        dist.init_process_group = begin


def reduce_forever(spec: GroupSpec, folder: str) -> None:
    with group(spec):
        while True:
            dist.all_reduce(torch.ones(10))
            Path(folder, str(spec.rank)).touch()  # now it may be killed


def backward_forever(spec: GroupSpec, folder: str) -> None:
    with group(spec):
        weights = Weights()
        layers = [torch.nn.Conv2d(2, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten()]
        model = torch.nn.Sequential(*layers, torch.nn.Linear(100, 3)).double()
        Reducer(weights, lambda keys, text: None).watch(model)
        while True:
            for x, y in batches(4, 6):
                F.cross_entropy(model(shard(x, weights)), shard(y, weights)).backward()
                Path(folder, str(spec.rank)).touch()


def rng(spec: GroupSpec) -> list[Any]:
    """Draws, again after restoring every rank's state, and after restoring the leader's."""
    with group(spec):
        torch.manual_seed(spec.rank)
        np.random.seed(spec.rank)
        states = collectives.gather(rng_state())
        before = (torch.rand(1).item(), np.random.rand())
        torch.rand(3)
        checkpoint.restore_rng(states)
        again = (torch.rand(1).item(), np.random.rand())
        checkpoint.restore_rng(states[:1])
        leaders = (torch.rand(1).item(), np.random.rand())
        return [before, again, leaders]
