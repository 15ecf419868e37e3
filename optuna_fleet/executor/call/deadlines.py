"""Until when devices have time to end what they were told to end."""

from __future__ import annotations

import time
from collections.abc import Iterable


class Deadlines:
    """Of devices, by the monotonic clock."""

    def __init__(self) -> None:
        self._until: dict[int, float] = {}

    def give(self, devices: Iterable[int], grace_s: float) -> None:
        """Let each device have so many seconds from now, or fewer if it had fewer."""
        until = time.monotonic() + grace_s
        for device in devices:
            self._until[device] = min(until, self._until.get(device, until))

    def drop(self, device: int) -> None:
        """The device needs no more time."""
        self._until.pop(device, None)

    def take_expired(self) -> list[int]:
        """Forget and return the devices whose time is over."""
        now = time.monotonic()
        expired = [device for device, until in self._until.items() if now >= until]
        for device in expired:
            del self._until[device]
        return expired

    def soonest(self) -> list[float]:
        """The next one, if there is any."""
        return sorted(self._until.values())[:1]
