"""Which devices were there when, during one call. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from optuna_fleet.events import DeviceGone, DeviceJoined, Event
from optuna_fleet.resources import Device
from optuna_fleet.sampler_bridge.ledger import DeviceSpan


class DeviceLog:
    """Notes from when to when each device was there.

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


def _span_of(device: Device, now: float) -> DeviceSpan:
    name = device.node_name or f"node {device.node}"
    return DeviceSpan(device=device.index, node=name, kind=device.kind, start=now)
