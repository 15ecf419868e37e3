"""A trace made sample by sample, from what Slurm's `sinfo` says of nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.replay.trace import NodeTrace, by_name, load_trace, save_trace

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
