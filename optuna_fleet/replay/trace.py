"""Idle nodes: which came and went, and when; read, written, and recorded from Slurm's `sinfo`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.files import replacing
from optuna_fleet.replay.workload import FleetChange
from optuna_fleet.resources import Device, Fleet


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTrace:
    """Which nodes were idle when.

    Attributes:
        time_s: [E] moments at which nodes come or go, seconds from the start, rising; the first
            is the start. Nothing need happen at the last, the end.
        initial_idle: [N] whether the node is idle at the start.
        event: [C] moment of each change, an index into `time_s`, not falling.
        node: [C] node that changes.
        delta: [C] +1 where it becomes idle, -1 where it is taken.
        names: [N] node names in ascending order, which lists rack after rack.
    """

    time_s: NDArray[np.float64]
    initial_idle: NDArray[np.bool_]
    event: NDArray[np.int64]
    node: NDArray[np.int64]
    delta: NDArray[np.int64]
    names: tuple[str, ...]

    @property
    def end_s(self) -> float:
        """Last moment of the trace."""
        return float(self.time_s[-1])

    def fleet(self) -> Fleet:
        """One device per node; neighbours in a rack are neighbours in the fleet."""
        return Fleet(
            devices=tuple(Device(index=i, node=i, kind="node") for i in range(len(self.names)))
        )

    def mean_nodes(self, until_s: float) -> float:
        """N_eq of BFTrainer's Eq. 17-18: node-seconds up to `until_s` over those seconds."""
        ends = np.append(self.time_s[1:], until_s).clip(max=until_s)
        lasted = (ends - self.time_s.clip(max=until_s)).clip(min=0.0)
        return float((self._num_idle() * lasted).sum() / until_s)

    def most_nodes(self) -> int:
        """Most nodes that are idle at once."""
        return int(self._num_idle().max())

    def _num_idle(self) -> NDArray[np.int64]:
        """[E] nodes that are idle from each moment on."""
        steps = np.zeros(len(self.time_s), dtype=np.int64)
        np.add.at(steps, self.event, self.delta)
        idle: NDArray[np.int64] = self.initial_idle.sum() + np.cumsum(steps)
        return idle

    def changes(self, *, repeats: bool = False) -> Iterator[FleetChange]:
        """The trace as changes of a fleet, in order; again and again if it `repeats`."""
        bounds = np.searchsorted(self.event, np.arange(len(self.time_s) + 1))
        idle = np.zeros(len(self.names), dtype=bool)
        offset_s = 0.0
        while True:
            for e, time_s in enumerate(self.time_s.tolist()):
                before = idle.copy()
                if e == 0:
                    idle = self.initial_idle.copy()
                rows = slice(bounds[e], bounds[e + 1])
                idle[self.node[rows]] = self.delta[rows] > 0
                yield FleetChange(
                    time_s=offset_s + time_s,
                    joined=tuple(np.flatnonzero(idle & ~before).tolist()),
                    left=tuple(np.flatnonzero(before & ~idle).tolist()),
                )
            if not repeats:
                return
            offset_s += self.end_s + float(np.diff(self.time_s).mean())


def trace_statistics(trace: NodeTrace) -> dict[str, float]:
    """What BFTrainer's section 2.1 says of idle nodes; spells are cut at start and end."""
    hours = (trace.end_s - float(trace.time_s[0])) / 3600
    spells = _spells_s(trace)
    is_short = spells < 600
    moments = {way: len(np.unique(trace.event[trace.delta == way])) for way in (1, -1)}
    return {
        "nodes": len(trace.names),
        "hours": hours,
        "mean_idle": float(spells.sum()) / 3600 / hours,
        "most_idle": trace.most_nodes(),
        "joins_per_h": moments[1] / hours,
        "leaves_per_h": moments[-1] / hours,
        "under_10_min": float(is_short.mean()) if len(spells) else 0.0,
        "time_under_10_min": float(spells[is_short].sum() / spells.sum()) if len(spells) else 0.0,
    }


def _spells_s(trace: NodeTrace) -> NDArray[np.float64]:
    """How long nodes were idle, each time."""
    start_s = np.where(trace.initial_idle, trace.time_s[0], np.nan)
    spells = []
    changes = (trace.time_s[trace.event], trace.node, trace.delta)
    for time_s, node, delta in zip(*(array.tolist() for array in changes), strict=True):
        if delta < 0:
            spells.append(time_s - start_s[node])
        start_s[node] = time_s if delta > 0 else np.nan
    return np.append(spells, trace.end_s - start_s[~np.isnan(start_s)])


def save_trace(trace: NodeTrace, path: Path, **more: Any) -> None:
    """Write the file that :func:`load_trace` reads, whole or not at all, with `more` arrays.

    Raises:
        FleetConfigError: It can't be written; what was there is as it was.
    """
    arrays: dict[str, Any] = {
        "time_s": trace.time_s,
        "initial_idle": trace.initial_idle,
        "change_event": trace.event,
        "change_node": trace.node,
        "change_delta": trace.delta,
        "node_name": np.array(trace.names, dtype=np.str_),
    }
    try:
        with replacing(path) as file:
            np.savez_compressed(file, **arrays, **more)
    except OSError as error:
        raise FleetConfigError(f"{path} can't be written: {error.strerror or error}.") from error


def load_trace(path: Path) -> NodeTrace:
    """A trace from a NumPy archive with the arrays of :class:`NodeTrace`.

    They are named `time_s`, `initial_idle`, `change_event`, `change_node`, `change_delta` and
    `node_name`.

    Raises:
        FleetConfigError: The file can't be read, or an array is missing or wrong.
    """
    arrays = _arrays(path)
    try:
        trace = NodeTrace(
            time_s=arrays["time_s"].astype(np.float64),
            initial_idle=arrays["initial_idle"].astype(bool),
            event=arrays["change_event"].astype(np.int64),
            node=arrays["change_node"].astype(np.int64),
            delta=arrays["change_delta"].astype(np.int64),
            names=tuple(map(str, arrays["node_name"])),
        )
        broken = next((rule for rule, holds in _RULES.items() if not holds(trace)), "")
    except ValueError as error:
        broken = str(error)
    if broken:
        raise FleetConfigError(f"{path} is no trace: {broken}.")
    return by_name(trace)


def by_name(trace: NodeTrace) -> NodeTrace:
    """The same with its names in ascending order."""
    order = np.argsort(trace.names, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return replace(
        trace,
        initial_idle=trace.initial_idle[order],
        node=rank[trace.node],
        names=tuple(trace.names[i] for i in order),
    )


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
        raise FleetConfigError(f"{path} is not a NumPy archive (.npz): {error}.") from error
    for name in _ARRAYS:
        if name not in arrays or arrays[name].ndim != 1:
            raise FleetConfigError(f"{path} has no array `{name}` of one dimension.")
    return arrays


def _alternates(trace: NodeTrace) -> bool:
    """Whether each node is taken and becomes idle in turn."""
    order = np.argsort(trace.node, kind="stable")
    node, delta = trace.node[order], trace.delta[order]
    first = np.append(True, node[1:] != node[:-1])
    before = np.where(first, trace.initial_idle[node] * 2 - 1, np.roll(delta, 1))
    return bool((delta == -before).all())


def _within(values: NDArray[np.int64], length: int) -> bool:
    return bool(((values >= 0) & (values < length)).all())


# Each can rely on those before it.
_RULES: dict[str, Callable[[NodeTrace], object]] = {
    "`time_s` must have at least 2 entries, rising from 0 or more": lambda t: (
        len(t.time_s) > 1
        and t.time_s[0] >= 0
        and np.isfinite(t.time_s).all()
        and (np.diff(t.time_s) > 0).all()
    ),
    "`initial_idle` must have an entry for each node, all arrays of changes as many": lambda t: (
        len(t.initial_idle) == len(t.names) and len(t.event) == len(t.node) == len(t.delta)
    ),
    "`change_event` must not fall, and count the entries of `time_s` from 0": lambda t: (
        (np.diff(t.event) >= 0).all() and _within(t.event, len(t.time_s))
    ),
    "`change_node` must count the nodes from 0": lambda t: _within(t.node, len(t.names)),
    "`change_delta` must be +1, -1 in turn for each node, as `initial_idle` begins": _alternates,
}


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A trace that goes on.

    Attributes:
        trace: So far; a file's from its second sample on.
        start: Its start, in seconds since the epoch.
        partition: Whose nodes they are; "" for all.
    """

    trace: NodeTrace
    start: float
    partition: str

    @classmethod
    def begun(cls, idle: Mapping[str, bool], start: float, partition: str) -> Recording:
        """With its first sample."""
        names = tuple(sorted(idle))
        none = np.zeros(0, dtype=np.int64)
        trace = NodeTrace(
            time_s=np.zeros(1),
            initial_idle=np.array([idle[name] for name in names], dtype=bool),
            event=none,
            node=none,
            delta=none,
            names=names,
        )
        return cls(trace=trace, start=start, partition=partition)

    @property
    def is_trace(self) -> bool:
        """Whether there are two samples."""
        return len(self.trace.time_s) > 1

    def sampled(self, idle: Mapping[str, bool], time_s: float) -> Recording:
        """With one more sample, so many seconds after the start; nodes not listed aren't idle."""
        trace = _with_nodes(self.trace, sorted(idle.keys() - set(self.trace.names)))
        last = len(trace.time_s) - 1
        if last and not (trace.event == last).any():  # was only the end
            trace = replace(trace, time_s=trace.time_s[:-1])
        now = trace.initial_idle.astype(np.int64)
        np.add.at(now, trace.node, trace.delta)
        delta = np.array([idle.get(name, False) for name in trace.names], dtype=np.int64) - now
        nodes = np.flatnonzero(delta)
        trace = replace(
            trace,
            time_s=np.append(trace.time_s, time_s),
            event=np.append(trace.event, np.full(len(nodes), len(trace.time_s))),
            node=np.append(trace.node, nodes),
            delta=np.append(trace.delta, delta[nodes]),
        )
        return replace(self, trace=trace)

    def save(self, path: Path) -> None:
        """Write it, whole or not at all."""
        save_trace(self.trace, path, start=np.float64(self.start), partition=self.partition)

    @classmethod
    def load(cls, path: Path, partition: str) -> Recording:
        """One that was saved, of the same partition.

        Raises:
            FleetConfigError: It is no recording, or of another partition.
        """
        trace = load_trace(path)
        with np.load(path) as archive:
            arrays = {name: archive[name] for name in ("start", "partition") if name in archive}
        if len(arrays) < 2:
            raise FleetConfigError(f"{path} was not recorded; give a file that is not there yet.")
        if (found := str(arrays["partition"])) != partition:
            raise FleetConfigError(
                f"{path} was recorded of {_named(found)}, not of {_named(partition)}; give "
                "another file."
            )
        return cls(trace=trace, start=float(arrays["start"]), partition=partition)


def _with_nodes(trace: NodeTrace, names: list[str]) -> NodeTrace:
    """The same with further nodes, which were not idle."""
    initial = np.append(trace.initial_idle, np.zeros(len(names), dtype=bool))
    return by_name(replace(trace, initial_idle=initial, names=(*trace.names, *names)))


def _named(partition: str) -> str:
    return f"partition {partition!r}" if partition else "all partitions"
