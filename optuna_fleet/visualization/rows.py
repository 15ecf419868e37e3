"""The rows of a timeline: devices, by node where there are several, and when they were there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import optuna

from optuna_fleet.sampler_bridge import compat
from optuna_fleet.sampler_bridge.records import DEVICES_PREFIX, DeviceSpan, device_spans_of

_LONGEST_NAME = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A device on a node; the node is "" where there is only one."""

    node: str
    device: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    """A device was there, from and to these seconds since the first flight."""

    row: Row
    start_s: float
    end_s: float


def node_of(study: optuna.Study) -> Callable[[str, int, float], str]:
    """From a call, a device and seconds since the epoch to its node's name; "" if there is one."""
    stays: dict[tuple[str, int], list[tuple[float, str]]] = defaultdict(list)
    for key, records in compat.study_records(study, DEVICES_PREFIX).items():
        for record in records:  # a number is a device of its call: drivers may run at once
            stay = record["start"], record["node"]
            stays[key.partition(":")[0], record["device"]].append(stay)
    if len({node for own in stays.values() for _, node in own}) < 2:
        return lambda call, device, time_s: ""

    def at(call: str, device: int, time_s: float) -> str:
        of_device = sorted(stays.get((call, device), []))
        before = [stay for stay in of_device if stay[0] <= time_s] or of_device[:1]
        return before[-1][1] if before else ""

    return at


def stays_of(study: optuna.Study, zero: float, last_s: float) -> list[Stay]:
    """When devices of several nodes were there; without an end, until there is other news of it.

    Nothing if all were on one node.

    Args:
        study: The study.
        zero: The first flight's start, in seconds since the epoch.
        last_s: The last flight's end, in seconds since then.
    """
    recorded = device_spans_of(study)
    if len({span.node for span in recorded}) < 2:
        return []
    by_device: dict[int, list[DeviceSpan]] = defaultdict(list)
    for span in recorded:
        by_device[span.device].append(span)
    stays = []
    for spans in by_device.values():
        nexts = [*(span.start for span in spans[1:]), zero + last_s]
        for span, following in zip(spans, nexts, strict=True):
            end = following if span.end is None else span.end
            start_s, end_s = max(0.0, span.start - zero), min(end - zero, last_s)
            if end_s > start_s:
                row = Row(node=span.node, device=span.device)
                stays.append(Stay(row=row, start_s=start_s, end_s=end_s))
    return stays


def in_order(rows: Iterable[Row]) -> list[Row]:
    """Each once, from the top: node by node."""
    distinct = set(rows)
    first: dict[str, int] = {}
    for row in distinct:
        first[row.node] = min(row.device, first.get(row.node, row.device))
    return sorted(distinct, key=lambda row: (first[row.node], row.node, row.device))


def num_nodes(rows: Iterable[Row]) -> int:
    """Number of nodes."""
    return len({row.node for row in rows})


def labels_of(rows: Sequence[Row]) -> list[str]:
    """Numbers of the devices; the first of each node has its name too."""
    labels, before = [], ""
    for row in rows:
        name = row.node if len(row.node) <= _LONGEST_NAME else f"{row.node[: _LONGEST_NAME - 1]}…"
        labels.append(f"{name}  {row.device}" if row.node != before else str(row.device))
        before = row.node
    return labels


def borders(rows: Sequence[Row]) -> list[float]:
    """Heights between the rows of one node and those of the next."""
    return [n - 0.5 for n in range(1, len(rows)) if rows[n].node != rows[n - 1].node]
