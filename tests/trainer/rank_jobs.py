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

import torch
import torch.distributed as dist

from optuna_fleet.exceptions import TrainerLostError
from optuna_fleet.trainer import groups
from optuna_fleet.trainer.gradients import collectives
from optuna_fleet.trainer.groups import GroupSpec


@contextmanager
def group(spec: GroupSpec, timeout_s: float = 30.0) -> Iterator[None]:
    groups.join_group(spec, "gloo", timeout_s)
    try:
        yield
    finally:
        groups.leave_group()


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
