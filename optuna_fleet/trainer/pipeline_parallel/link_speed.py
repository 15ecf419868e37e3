"""How fast the ways between the devices of a trial are, measured once when it begins on them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from optuna_fleet.alloc.partition import Link, Links
from optuna_fleet.trainer.checkpoints import checkpoint
from optuna_fleet.trainer.groups import gloo_group

_NUM_BYTES = 2**20
_REPEATS = 3


def measured_links(nodes: Sequence[int], rank: int, usual: Link) -> Links:
    """Links within a node and between nodes, each by one pair of neighbouring ranks.

    Args:
        nodes: Of each rank; all ranks call it.
        rank: Of this process.
        usual: Where there is no such pair; and messages take its latency at least.
    """
    group: Any = dist.group.WORLD  # by gloo, as everything between stages
    if dist.get_backend() != "gloo":
        group = gloo_group()
    found: list[Link] = []
    for is_within in (True, False):
        firsts = [at for at, (a, b) in enumerate(pairwise(nodes)) if (a == b) is is_within]
        own: dict[str, float] = {}
        if firsts and rank in (firsts[0], firsts[0] + 1):
            there = 2 * firsts[0] + 1 - rank
            short_s = _there_and_back_s(1, there, group, starts=rank < there)
            long_s = _there_and_back_s(_NUM_BYTES, there, group, starts=rank < there)
            own = {"short_s": short_s, "long_s": long_s}
        told = checkpoint.gather(own)
        found.append(link_of(**told[firsts[0]], usual=usual) if firsts else usual)
    return Links(within=found[0], between=found[1])


def link_of(short_s: float, long_s: float, usual: Link) -> Link:
    """By the seconds that a short and a long message took there and back."""
    each_s = max(long_s - short_s, 1e-9) / 2
    return Link(bytes_per_s=_NUM_BYTES / each_s, latency_s=max(short_s / 2, usual.latency_s))


def _there_and_back_s(num_bytes: int, there: int, group: Any, *, starts: bool) -> float:
    message = torch.zeros(num_bytes, dtype=torch.uint8)
    taken: list[float] = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        if starts:
            dist.send(message, there, group=group)
            dist.recv(message, there, group=group)
        else:
            dist.recv(message, there, group=group)
            dist.send(message, there, group=group)
        taken.append(time.perf_counter() - began)
    return min(taken)
