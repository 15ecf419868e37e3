"""What is counted while a call runs, for its `FleetSummary`, and noted for the study."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from optuna_fleet.events import DeviceGone, DeviceJoined, Event
from optuna_fleet.executor.call.summary import FleetSummary, Solved, mean_of
from optuna_fleet.pipeline.stats import PipelineStats
from optuna_fleet.resources import Device
from optuna_fleet.sampler_bridge.records import Decision, DeviceSpan, PipelineSpan
from optuna_fleet.wire.messages import Usage

MIN_SPAN_S = 2.0
"""No span is shorter, except the last."""

RESOLUTION = 64
"""A span takes at least this part of the time since the call began: a sweep of any length has
little more than as many of them (630 for 100 hours)."""


class DeviceLog:
    """Notes from when to when each device was there. Pure.

    Args:
        record: Given all spans, and the positions of those that have changed.

    Attributes:
        spans: One for each time that a device was there; while it is, without an end.
    """

    def __init__(
        self, record: Callable[[Sequence[DeviceSpan], Sequence[int]], None] | None = None
    ) -> None:
        self.spans: list[DeviceSpan] = []
        self._record = record
        self._last: dict[int, int] = {}  # device -> position of its last span

    def begin(self, devices: Iterable[Device], now: float) -> None:
        """The call begins with these devices."""
        self._change(now, joined=devices)

    def note(self, events: Sequence[Event], devices: Iterable[Device], now: float) -> None:
        """Take what the controller is told.

        Where one trainer is ready, its node is there: `devices` are those of all nodes.
        """
        joined = [event.device for event in events if isinstance(event, DeviceJoined)]
        gone = [event.device for event in events if isinstance(event, DeviceGone)]
        new = [d for d in devices if d.index not in self._last] if joined else []
        if joined or gone:
            self._change(now, joined=[*joined, *new], gone=gone)

    def end(self, now: float) -> None:
        """The call is over."""
        self._change(now, gone=self._last)

    def _change(
        self, now: float, *, joined: Iterable[Device] = (), gone: Iterable[int] = ()
    ) -> None:
        changed = []
        for number in gone:
            if self._is_there(number):
                position = self._last[number]
                self.spans[position] = replace(self.spans[position], end=now)
                changed.append(position)
        for device in joined:
            if not self._is_there(device.index):
                changed.append(len(self.spans))
                self._last[device.index] = len(self.spans)
                self.spans.append(_span_of(device, now))
        if changed and self._record is not None:
            self._record(self.spans, changed)

    def _is_there(self, device: int) -> bool:
        position = self._last.get(device)
        return position is not None and self.spans[position].end is None

    def there_s(self, now: float) -> dict[int, float]:
        """Seconds that each device was there, up to now."""
        seconds: dict[int, float] = {}
        for span in self.spans:
            lasted = (now if span.end is None else span.end) - span.start
            seconds[span.device] = seconds.get(span.device, 0.0) + max(0.0, lasted)
        return seconds


class Moves:
    """Measures for how long a trial that moves is on devices without training.

    That is from the order to leave until its last rank has left, and from its launch until its
    first batch there is done: checkpoint, set-up, compilation. How long it had to wait for its new
    devices is no cost of the move.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds: list[float] = []
        self._clock = clock
        self._ordered: dict[int, float] = {}
        self._spent_s: dict[int, float] = {}
        self._launched: dict[int, float] = {}

    def leaves(self, number: int) -> None:
        """The trial was told to leave its devices, or begins to."""
        self._ordered.setdefault(number, self._clock())

    def stays(self, number: int) -> None:
        """The trial did not leave."""
        self._ordered.pop(number, None)

    def left(self, number: int) -> None:
        """It is on no device now."""
        self._launched.pop(number, None)
        ordered = self._ordered.pop(number, None)
        if ordered is not None:
            self._spent_s[number] = self._clock() - ordered

    def launched(self, number: int) -> None:
        """It is on devices again."""
        self._launched[number] = self._clock()

    def trains(self, number: int) -> float | None:
        """It has done a batch; return the seconds that its move has cost, if it has moved."""
        launched, spent_s = self._launched.pop(number, None), self._spent_s.pop(number, None)
        if launched is None or spent_s is None:
            return None
        self.seconds.append(spent_s + self._clock() - launched)
        return self.seconds[-1]


class PipelineLog:
    """Turns counts since the start of the fleet into spans. Pure.

    Args:
        base: What had been done when the call began.
        began: When that was, in seconds since the epoch.
    """

    def __init__(
        self, record: Callable[[PipelineSpan], None], base: PipelineStats, began: float
    ) -> None:
        self._record = record
        self._base = self._last = base
        self._began = self._noted = began

    def note(self, stats: PipelineStats, now: float) -> None:
        """So much was done by now; that ends a span if enough time has passed."""
        if now - self._noted >= max(MIN_SPAN_S, (now - self._began) / RESOLUTION):
            self._end_span(stats, now)

    def finish(self, stats: PipelineStats, now: float) -> PipelineStats:
        """The call is over; returns what the pipeline did for it."""
        self._end_span(stats, now)
        return stats.since(self._base)

    def _end_span(self, stats: PipelineStats, now: float) -> None:
        use = stats.use.since(self._last.use)
        start, self._noted, self._last = self._noted, now, stats
        if use.active_s <= 0.0:
            return  # nobody read
        self._record(
            PipelineSpan(
                start=round(start, 3),
                end=round(now, 3),
                num_preprocessors=round(use.num_preprocessors, 2),
                busy=round(use.busy_share, 3),
                blocked=round(use.blocked_share, 3),
                stalled=round(use.stalled_share, 3),
                queue=round(use.queue_share, 3),
            )
        )


@dataclass(slots=True, kw_only=True)
class Tally:
    """Adds up what a `FleetSummary` says."""

    began: float = field(default_factory=time.monotonic)
    devices: DeviceLog = field(default_factory=DeviceLog)
    trials: Counter[str] = field(default_factory=Counter)
    busy_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    waited_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    probing_s: float = 0.0
    profiling_s: float = 0.0
    decisions: list[Decision] = field(default_factory=list)
    plans: list[Solved] = field(default_factory=list)
    rescales: int = 0
    moves: Moves = field(default_factory=Moves)
    left_out: Mapping[str, str] = field(default_factory=dict)
    startup_s: float | None = None

    def launched(self) -> None:
        """A trial begins."""
        if self.startup_s is None:
            self.startup_s = self.age_s

    def add_stay(self, device: int, seconds: float, usage: Usage, *, probe: bool) -> None:
        """A rank was on a device for that long."""
        self.busy_s[device] += seconds
        self.waited_s[device] += usage.data_wait_s
        self.probing_s += usage.probing_s if probe else 0.0
        self.profiling_s += usage.profiling_s

    @property
    def age_s(self) -> float:
        """Seconds since the call began."""
        return time.monotonic() - self.began

    def summary(self, pipeline: PipelineStats | None, exchange: str = "") -> FleetSummary:
        """The summary of everything added, up to now."""
        there_s = self.devices.there_s(time.time())
        return FleetSummary(
            trials=dict(self.trials),
            num_devices=len(there_s),
            num_nodes=len({span.node for span in self.devices.spans}),
            there_s=there_s,
            duration_s=self.age_s,
            busy_s=dict(self.busy_s),
            waited_s=dict(self.waited_s),
            probing_s=self.probing_s,
            profiling_s=self.profiling_s,
            decisions=tuple(self.decisions),
            plans=tuple(self.plans),
            rescales=self.rescales,
            move_s=mean_of(self.moves.seconds),
            pipeline=pipeline,
            exchange=exchange,
            left_out=dict(self.left_out),
            startup_s=self.startup_s or 0.0,
        )


def _span_of(device: Device, now: float) -> DeviceSpan:
    name = device.node_name or f"node {device.node}"
    return DeviceSpan(device=device.index, node=name, kind=device.kind, start=now)
