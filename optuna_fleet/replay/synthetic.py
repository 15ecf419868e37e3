"""Made-up idle nodes that come and go as Summit's did, by what BFTrainer's authors published."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from optuna_fleet.replay.trace import NodeTrace, trace_of

SUMMIT_NODES = 4608
"""Section 2.1."""

_SAMPLES_PER_H = 360
"""Section 2.1: who is idle was looked up every 10 seconds."""

_JOINS_PER_H, _LEAVES_PER_H = 42.0, 31.0
"""Section 2.1: moments at which nodes joined, and at which nodes left."""

_IDLE_NODES = 407.0
"""Section 2.1: in the mean, of the whole machine."""

_LOG_SPREAD = 0.2019 + 1.2816
_LOG_MEAN = math.log(600 / 10) - 0.2019 * _LOG_SPREAD
_MEAN_SAMPLES = math.exp(_LOG_MEAN + _LOG_SPREAD**2 / 2)
"""Section 2.1, Fig. 1: about 58 % of the fragments are shorter than 10 minutes, with about 10 %
of the idle time. One log-normal distribution has that; the normal's quantiles are 0.2019 and
-1.2816."""

_BATCH_SPREAD = 1.6
"""Not published in numbers; only that over a thousand are idle "rarely and briefly"."""

_TOGETHER = 6
"""Not published: so many neighbours that join together leave together."""

_WARM_UP = 24 * _SAMPLES_PER_H


def synthetic_trace(seed: int, *, num_nodes: int = 1024, hours: float = 168.0) -> NodeTrace:
    """A trace with the statistics that BFTrainer's section 2.1 and Fig. 1 give.

    On all 4,608 nodes, over a week, they are within a tenth of what is published: 42 moments an
    hour at which nodes join and 31 at which nodes leave, 8.8 % of the nodes idle in the mean, 58 %
    of the fragments shorter than 10 minutes, with 10 % of the idle time (within two points each).
    Fewer nodes are a part of the machine, as the 1,024 of the paper's experiments: fewer moments
    concern them. What was not published (how many nodes come at once) is a guess.

    Args:
        seed: The same gives the same trace.
        num_nodes: At most `SUMMIT_NODES`.
        hours: How long; in steps of 10 seconds.
    """
    rng = np.random.default_rng(seed)
    last = _WARM_UP + max(1, round(hours * _SAMPLES_PER_H))
    spells = list(_spells(rng, num_nodes, last))
    join, leave, node = np.concatenate([np.zeros((3, 0), np.int64), *spells], axis=1)
    initial = np.zeros(num_nodes, dtype=bool)
    initial[node[(join <= _WARM_UP) & (leave > _WARM_UP)]] = True
    sample, node = np.append(join, leave), np.append(node, node)
    delta = np.repeat([1, -1], len(join))
    order = np.argsort(sample, kind="stable")
    order = order[(sample[order] > _WARM_UP) & (sample[order] <= last)]
    samples = np.unique(np.append(sample[order], [_WARM_UP, last]))
    return trace_of(
        time_s=(samples - _WARM_UP) * 3600 / _SAMPLES_PER_H,
        initial_idle=initial,
        change_event=np.searchsorted(samples, sample[order]),
        change_node=node[order],
        change_delta=delta[order],
        node_name=[f"node{k:04d}" for k in range(num_nodes)],
    )


def _spells(rng: np.random.Generator, num_nodes: int, last: int) -> Iterator[NDArray[np.int64]]:
    """For each moment at which nodes join: [3, K] when they join and leave, and which they are."""
    joins, leaves = (
        np.flatnonzero(rng.random(last + 1) < rate / _SAMPLES_PER_H)
        for rate in (_JOINS_PER_H, _LEAVES_PER_H)
    )
    mean = _IDLE_NODES / _MEAN_SAMPLES * _SAMPLES_PER_H / _JOINS_PER_H
    log_sizes = rng.normal(math.log(mean) - _BATCH_SPREAD**2 / 2, _BATCH_SPREAD, len(joins))
    sizes = np.exp(log_sizes).round().clip(1, SUMMIT_NODES).astype(np.int64)
    busy_after = np.full(num_nodes, -1)
    for join, size in zip(joins.tolist(), sizes.tolist(), strict=True):
        busy = np.flatnonzero(busy_after < join)
        count = min(int(rng.binomial(size, num_nodes / SUMMIT_NODES)), len(busy))
        if count:
            nodes = np.roll(busy, -int(rng.integers(len(busy))))[:count]
            group = np.arange(count) // _TOGETHER
            lengths = np.exp(rng.normal(_LOG_MEAN, _LOG_SPREAD, group[-1] + 1))[group]
            # A node that was idle in one sample only was not counted (section 2.1).
            ends = _nearest(leaves[leaves >= join + 2], join + lengths, last)
            busy_after[nodes] = ends
            yield np.stack([np.full(count, join), ends, nodes])


def _nearest(
    leaves: NDArray[np.int64], wanted: NDArray[np.float64], last: int
) -> NDArray[np.int64]:
    """Of the moments at which nodes leave the nearest ones; beyond the end the one after it."""
    leaves = np.append(leaves, last + 1)
    after = np.searchsorted(leaves, wanted).clip(max=len(leaves) - 1)
    before = (after - 1).clip(min=0)
    is_before = wanted - leaves[before] < leaves[after] - wanted
    nearest: NDArray[np.int64] = leaves[np.where(is_before & (wanted <= last), before, after)]
    return nearest
