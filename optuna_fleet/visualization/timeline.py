"""What a timeline shows: which trial was on which device when, from a study's records."""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from optuna_fleet.arguments import check_that, is_a
from optuna_fleet.events import Ending
from optuna_fleet.sampler_bridge import compat
from optuna_fleet.sampler_bridge.records import (
    DEVICES_PREFIX,
    DeviceSpan,
    device_spans_of,
    flights_of,
)

Row = tuple[str, int]
"""A device's node, "" where there is only one, and its number."""


class Mark(Enum):
    """What is worth seeing at the end of a flight; the value is the legend's text."""

    PRUNED = "pruned"
    FAILED = "failed"
    MOVED = "checkpointed to move"
    LOST = "devices lost"


_BY_STATE = {TrialState.PRUNED: Mark.PRUNED, TrialState.FAIL: Mark.FAILED}
_BY_ENDING = {Ending.YIELDED.value: Mark.MOVED, Ending.LOST.value: Mark.LOST}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A trial was on a device, from and to these seconds since the study's first flight.

    `text` says more of it, as HTML.
    """

    number: int
    row: Row
    start_s: float
    end_s: float
    round: int
    mark: Mark | None = None
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    """A device was there, from and to these seconds since the study's first flight."""

    row: Row
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What is drawn.

    Attributes:
        name: The study's.
        bars: One per flight and device, by start.
        stays: When devices of several nodes were there; none if all were on one node.
    """

    name: str
    bars: tuple[Bar, ...]
    stays: tuple[Stay, ...] = ()

    @property
    def rows(self) -> list[Row]:
        """The devices from the top: node by node."""
        distinct = {bar.row for bar in self.bars} | {stay.row for stay in self.stays}
        first: dict[str, int] = {}
        for node, device in distinct:
            first[node] = min(device, first.get(node, device))
        return sorted(distinct, key=lambda row: (first[row[0]], row))

    @property
    def numbers(self) -> list[int]:
        """The trials' numbers."""
        return sorted({bar.number for bar in self.bars})

    @property
    def duration_s(self) -> float:
        """From the first start to the last end; never 0."""
        return max((bar.end_s for bar in self.bars), default=0.0) or 1.0

    @property
    def round_starts(self) -> list[float]:
        """When the round of newly started flights increases.

        Each call of `optimize` counts its rounds anew; it begins after all earlier flights ended.
        """
        starts: list[float] = []
        current, last_end_s = self.bars[0].round if self.bars else 0, 0.0
        for bar in self.bars:
            if bar.round > current:
                starts.append(bar.start_s)
            is_new_call = bar.round < current and bar.start_s >= last_end_s
            current = bar.round if is_new_call else max(current, bar.round)
            last_end_s = max(last_end_s, bar.end_s)
        return starts


def timeline_of(study: optuna.Study) -> Timeline:
    """What the study recorded of its trials; warns if none ran on a fleet."""
    check_that("study", study, is_a(optuna.Study), "be a study, as of optuna.load_study()")
    flights, nodes = flights_of(study), _Nodes(study)
    zero = min((few[0]["start"] for few in flights.values()), default=0.0)
    bars = [
        bar
        for trial in study.get_trials(deepcopy=False)
        for bar in _bars(trial, flights.get(trial.number, ()), zero, nodes)
    ]
    if not bars:
        message = "Your study does not have any flights: no trial ran on a fleet."
        compat.fleet_logger.warning(message)
    bars.sort(key=lambda bar: (bar.start_s, bar.number, bar.row[1]))
    shown = Timeline(name=study.study_name, bars=tuple(bars))
    return replace(shown, stays=tuple(_stays(device_spans_of(study), zero, shown.duration_s)))


class _Nodes:
    """Which node a device was on; "" if all were on one."""

    def __init__(self, study: optuna.Study) -> None:
        self._stays: dict[tuple[str, int], list[tuple[float, str]]] = defaultdict(list)
        for key, records in compat.study_records(study, DEVICES_PREFIX).items():
            for record in records:  # a number is a device of its call: drivers may run at once
                stay = record["start"], record["node"]
                self._stays[key.partition(":")[0], record["device"]].append(stay)
        if len({node for own in self._stays.values() for _, node in own}) < 2:
            self._stays.clear()

    def at(self, call: str, device: int, time_s: float) -> str:
        of_device = sorted(self._stays.get((call, device), []))
        before = [stay for stay in of_device if stay[0] <= time_s] or of_device[:1]
        return before[-1][1] if before else ""


def _bars(
    trial: FrozenTrial, flights: Sequence[Mapping[str, Any]], zero: float, nodes: _Nodes
) -> Iterator[Bar]:
    for nth, flight in enumerate(flights, start=1):
        end = max(flight["start"], flight["end"])  # a clock may be set back
        start_s, end_s, is_last = flight["start"] - zero, end - zero, nth == len(flights)
        mark = (_BY_STATE.get(trial.state) if is_last else None) or _BY_ENDING.get(
            flight["ending"]
        )
        for device in flight["devices"]:
            node = nodes.at(flight["call"], device, flight["start"])
            lines = [
                *_about(trial),
                f"devices: {', '.join(map(str, flight['devices']))}",
                *([f"node: {html.escape(node)}"] if node else []),
                f"round: {flight['round']}",
                f"flight {nth} of {len(flights)}: {start_s:.1f} s to {end_s:.1f} s",
                f"waited for data: {flight['data_wait_s']:.1f} s, "
                f"probing: {flight['probing_s']:.1f} s",
                f"the flight ended: {flight['ending']}",
            ]
            yield Bar(
                number=trial.number,
                row=(node, device),
                start_s=start_s,
                end_s=end_s,
                round=flight["round"],
                mark=mark,
                text="<br>".join(lines),
            )


def _about(trial: FrozenTrial) -> list[str]:
    values = ", ".join(f"{value:.6g}" for value in trial.values or ()) or "none yet"
    params = (
        f"{html.escape(name)}: {html.escape(_short(value))}"
        for name, value in trial.params.items()
    )
    return [
        f"<b>trial {trial.number}</b> ({trial.state.name.lower()})",
        f"value: {values}",
        *params,
    ]


def _short(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _stays(recorded: Sequence[DeviceSpan], zero: float, last_s: float) -> Iterator[Stay]:
    """What has no end ends where there is other news of the device, or with the last flight."""
    if len({span.node for span in recorded}) < 2:
        return
    by_device: dict[int, list[DeviceSpan]] = defaultdict(list)
    for span in recorded:
        by_device[span.device].append(span)
    for spans in by_device.values():
        nexts = [*(span.start for span in spans[1:]), zero + last_s]
        for span, following in zip(spans, nexts, strict=True):
            end = following if span.end is None else span.end
            start_s, end_s = max(0.0, span.start - zero), min(end - zero, last_s)
            if end_s > start_s:
                yield Stay(row=(span.node, span.device), start_s=start_s, end_s=end_s)
