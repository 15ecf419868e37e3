"""Idle nodes: which came and went, and when; in files, from Slurm's `sinfo`, or made up."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.files import replacing
from optuna_fleet.replay.workload import FleetChange
from optuna_fleet.resources import Device, Fleet


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTrace:
    """Which nodes were idle when.

    Attributes:
        names: Of the nodes; ascending ones list rack after rack.
        changes: Who became idle ("joined"), or was taken ("left"), as places in `names`; by time.
            The first is the start. Nothing need happen at the last, the end.
    """

    names: tuple[str, ...]
    changes: tuple[FleetChange, ...]

    @property
    def end_s(self) -> float:
        """Last moment of the trace."""
        return self.changes[-1].time_s

    @property
    def time_s(self) -> NDArray[np.float64]:
        """The moments of all changes, seconds from the start."""
        return np.array([change.time_s for change in self.changes])

    def fleet(self) -> Fleet:
        """One device per node; neighbours in a rack are neighbours in the fleet."""
        return Fleet(
            devices=tuple(Device(index=i, node=i, kind="node") for i in range(len(self.names)))
        )

    def mean_nodes(self, until_s: float) -> float:
        """N_eq of BFTrainer's Eq. 17-18: node-seconds up to `until_s` over those seconds."""
        ends = np.append(self.time_s[1:], until_s).clip(max=until_s)
        lasted = (ends - self.time_s.clip(max=until_s)).clip(min=0.0)
        return float((self.num_idle() * lasted).sum() / until_s)

    def num_idle(self) -> NDArray[np.int64]:
        """How many nodes are idle from each change on."""
        return np.cumsum([len(change.joined) - len(change.left) for change in self.changes])

    def idle_at_end(self) -> set[int]:
        """Who is idle then."""
        idle: set[int] = set()
        for change in self.changes:
            idle.update(change.joined)
            idle.difference_update(change.left)
        return idle

    def sampled(self, idle: Mapping[str, bool], time_s: float) -> NodeTrace:
        """With one more sample; nodes come in the order in which they were seen first.

        Args:
            idle: Whether each node is idle; who is not listed isn't.
            time_s: Seconds after the start.
        """
        names = (*self.names, *sorted(idle.keys() - {*self.names}))
        now, before = {n for n, x in enumerate(names) if idle.get(x)}, self.idle_at_end()
        joined, left = tuple(sorted(now - before)), tuple(sorted(before - now))
        changes = self.changes
        if len(changes) > 1 and not (changes[-1].joined or changes[-1].left):  # was only the end
            changes = changes[:-1]
        change = FleetChange(time_s=time_s, joined=joined, left=left)
        return NodeTrace(names=names, changes=(*changes, change))

    def repeated(self) -> Iterator[FleetChange]:
        """The changes again and again, without an end."""
        yield from self.changes
        first, *later = self.changes
        at_first, at_last = {*first.joined}, self.idle_at_end()
        joined, left = sorted(at_first - at_last), sorted(at_last - at_first)
        again = replace(first, joined=tuple(joined), left=tuple(left))
        lasts_s = offset_s = self.end_s + float(np.diff(self.time_s).mean())
        while True:
            for change in (again, *later):
                yield replace(change, time_s=offset_s + change.time_s)
            offset_s += lasts_s


def trace_statistics(trace: NodeTrace) -> dict[str, float]:
    """What BFTrainer's section 2.1 says of idle nodes; spells are cut at start and end."""
    first, *later = trace.changes
    hours = (trace.end_s - first.time_s) / 3600
    spells = _spells_s(trace)
    is_short = spells < 600
    return {
        "nodes": len(trace.names),
        "hours": hours,
        "mean_idle": float(spells.sum()) / 3600 / hours,
        "most_idle": int(trace.num_idle().max()),
        "joins_per_h": sum(bool(change.joined) for change in later) / hours,
        "leaves_per_h": sum(bool(change.left) for change in later) / hours,
        "under_10_min": float(is_short.mean()) if len(spells) else 0.0,
        "time_under_10_min": float(spells[is_short].sum() / spells.sum()) if len(spells) else 0.0,
    }


def _spells_s(trace: NodeTrace) -> NDArray[np.float64]:
    """How long nodes were idle, each time."""
    since: dict[int, float] = {}
    spells: list[float] = []
    for change in trace.changes:
        spells += [change.time_s - since.pop(node) for node in change.left]
        since |= dict.fromkeys(change.joined, change.time_s)
    return np.array([*spells, *(trace.end_s - start_s for start_s in since.values())])


# -- files ----------------------------------------------------------------------------------------


def save_trace(trace: NodeTrace, path: Path) -> None:
    """Write the file that :func:`load_trace` reads, whole or not at all.

    Raises:
        FleetConfigError: It can't be written; what was there is as it was.
    """
    rows = [
        (event, node, delta)
        for event, change in enumerate(trace.changes[1:], 1)
        for nodes, delta in ((change.left, -1), (change.joined, 1))
        for node in nodes
    ]
    event, node, delta = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    arrays: dict[str, Any] = {
        "time_s": trace.time_s,
        "initial_idle": np.isin(np.arange(len(trace.names)), trace.changes[0].joined),
        "change_event": event,
        "change_node": node,
        "change_delta": delta,
        "node_name": np.array(trace.names, dtype=np.str_),
    }
    try:
        with replacing(path) as file:
            np.savez_compressed(file, **arrays)
    except OSError as error:
        raise FleetConfigError(f"{path} can't be written: {error.strerror or error}.") from error


def load_trace(path: Path) -> NodeTrace:
    """A trace from a NumPy archive with the arrays that :func:`trace_of` takes.

    Raises:
        FleetConfigError: The file can't be read, or an array is missing or wrong.
    """
    arrays = _arrays(path)
    try:
        return trace_of(**arrays)
    except ValueError as error:
        raise FleetConfigError(f"{path} is no trace: {error}.") from error


def trace_of(
    *,
    time_s: ArrayLike,
    initial_idle: ArrayLike,
    change_event: ArrayLike,
    change_node: ArrayLike,
    change_delta: ArrayLike,
    node_name: ArrayLike,
) -> NodeTrace:
    """A trace from arrays of E moments, N nodes and C changes; nodes are put in order of names.

    Args:
        time_s: [E] moments at which nodes come or go, seconds from the start, rising.
        initial_idle: [N] whether the node is idle at the start.
        change_event: [C] moment of each change, an index into `time_s`, not falling.
        change_node: [C] node that changes.
        change_delta: [C] +1 where it becomes idle, -1 where it is taken.
        node_name: [N] names of the nodes.

    Raises:
        ValueError: They are not such.
    """
    moments, idle = np.asarray(time_s, np.float64), np.asarray(initial_idle, np.bool_)
    event, node, delta = (
        np.asarray(each).astype(np.int64) for each in (change_event, change_node, change_delta)
    )
    names = [str(name) for name in np.asarray(node_name)]
    are_moments = len(moments) > 1 and np.isfinite(moments).all() and moments[0] >= 0
    if not (are_moments and (np.diff(moments) > 0).all()):
        raise ValueError("`time_s` must have at least 2 entries, rising from 0 or more")
    if not (len(idle) == len(names) and len(event) == len(node) == len(delta)):
        raise ValueError(
            "`initial_idle` must have an entry for each node, all arrays of changes as many"
        )
    if (np.diff(event) < 0).any() or not _within(event, len(moments)):
        raise ValueError("`change_event` must not fall, and count the entries of `time_s` from 0")
    if not _within(node, len(names)):
        raise ValueError("`change_node` must count the nodes from 0")
    order = np.argsort(names, kind="stable")
    place = np.argsort(order)[node].tolist()
    rows = list(zip(place, delta.tolist(), strict=True))
    bounds = np.searchsorted(event, np.arange(len(moments) + 1)).tolist()
    now, changes = {*np.flatnonzero(idle[order]).tolist()}, []
    before: set[int] = set()
    for e, moment_s in enumerate(moments.tolist()):
        for n, sign in rows[bounds[e] : bounds[e + 1]]:
            if sign != (-1 if n in now else 1):
                raise ValueError(
                    "`change_delta` must be +1, -1 in turn for each node, as `initial_idle` begins"
                )
            now ^= {n}
        joined, left = tuple(sorted(now - before)), tuple(sorted(before - now))
        changes.append(FleetChange(time_s=moment_s, joined=joined, left=left))
        before = set(now)
    return NodeTrace(names=tuple(names[i] for i in order), changes=tuple(changes))


_ARRAYS = (
    *("time_s", "initial_idle", "node_name"),
    *("change_event", "change_node", "change_delta"),
)


def _arrays(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in _ARRAYS if name in archive}
    except OSError as error:
        raise FleetConfigError(f"{path} can't be read: {error.strerror or error}.") from error
    except Exception as error:  # NumPy raises many kinds
        # What NumPy says would have the user load it as a pickle.
        raise FleetConfigError(
            f"{path} is not a NumPy archive (.npz) of plain arrays, as `optuna-fleet record` "
            "writes."
        ) from error
    for name in _ARRAYS:
        if name not in arrays or arrays[name].ndim != 1:
            raise FleetConfigError(f"{path} has no array `{name}` of one dimension.")
    return arrays


def _within(values: NDArray[np.int64], length: int) -> bool:
    return bool(((values >= 0) & (values < length)).all())


# -- recorded from Slurm --------------------------------------------------------------------------

_LINE = re.compile(r"([\w.-]+)\|([a-z_]+\W*)")
_IDLE = ("idle", "idle-", "plnd")
"""The latter two: planned for a job that can't start yet. Others, as "idle~", are no use now."""


def idle_nodes(text: str) -> dict[str, bool]:
    """All nodes that ``sinfo --format=%N|%t`` lists, and whether they are idle.

    Idle are nodes that run nothing, also where a job is planned; not those that are powered down,
    drained, reserved for maintenance, or don't answer.

    Raises:
        FleetConfigError: A line is none of sinfo's, or there are none.
    """
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("CLUSTER: ")]
    found = [(line, _LINE.fullmatch(line)) for line in lines]
    if damaged := [line for line, match in found if match is None]:
        raise FleetConfigError(
            f"`sinfo` says {damaged[0][:60]!r}, but must say node and state, as in 'node1|idle'."
        )
    if not found:
        raise FleetConfigError("`sinfo` lists no nodes; `sinfo --summarize` lists the partitions.")
    return {match[1]: match[2] in _IDLE for _, match in found if match}


# -- made up, by what BFTrainer's authors published of Summit ---------------------------------

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
