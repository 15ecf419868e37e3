"""From when to when each device was there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from optuna_fleet.events import DeviceGone, DeviceJoined
from optuna_fleet.executor.call.journal import Entry, Stay
from optuna_fleet.resources import Device
from optuna_fleet.sampler_bridge.records import DeviceSpan


class DeviceLog:
    """Makes spans of devices that join and are gone: a reader of the journal.

    Args:
        record: Given all spans, and the positions of those that have changed.
        there: The devices of all nodes: where one trainer is ready, its node is there.

    Attributes:
        spans: One for each time that a device was there; while it is, without an end.
    """

    def __init__(
        self,
        record: Callable[[Sequence[DeviceSpan], Sequence[int]], None],
        there: Callable[[], Iterable[Device]],
    ) -> None:
        self.spans: list[DeviceSpan] = []
        self._record = record
        self._there = there
        self._last: dict[int, int] = {}  # device -> position of its last span
        self._changed: list[int] = []

    def begin(self, now: float) -> None:
        """The call begins with the devices that are there."""
        self._join(self._there(), now)
        self.write()

    def take(self, entry: Entry, stay: Stay | None, now: float) -> None:
        """See `Reader`; `write` what comes of it."""
        if isinstance(entry, DeviceJoined):
            new = (device for device in self._there() if device.index not in self._last)
            self._join([entry.device, *new], now)
        elif isinstance(entry, DeviceGone):
            self._leave(entry.device, now)

    def write(self) -> None:
        """Record what has changed."""
        if self._changed:
            changed, self._changed = self._changed, []
            self._record(self.spans, changed)

    def end(self, now: float) -> None:
        """The call is over."""
        for device in self._last:
            self._leave(device, now)
        self.write()

    def _join(self, devices: Iterable[Device], now: float) -> None:
        for device in devices:
            if self._is_there(device.index):
                continue
            self._last[device.index] = len(self.spans)
            self._changed.append(len(self.spans))
            name = device.node_name or f"node {device.node}"
            self.spans.append(
                DeviceSpan(device=device.index, node=name, kind=device.kind, start=now)
            )

    def _leave(self, device: int, now: float) -> None:
        if self._is_there(device):
            position = self._last[device]
            self.spans[position] = replace(self.spans[position], end=now)
            self._changed.append(position)

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
