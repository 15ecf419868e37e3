"""What moves to other devices really cost, as seen by the driver."""

from __future__ import annotations

import time
from collections.abc import Callable


class Moves:
    """Measures for how long a trial that moves is on devices without training.

    That is from the order to leave until its last rank has left, and from its launch until its
    first batch there is done: checkpoint, set-up, compilation. How long it had to wait for its new
    devices is no cost of the move.

    Attributes:
        seconds: What each has cost.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds: list[float] = []
        self._clock = clock
        self._ordered: dict[int, float] = {}
        self._spent_s: dict[int, float] = {}
        self._launched: dict[int, float] = {}

    def leaves(self, number: int) -> None:
        """The trial was told to leave its devices."""
        self._ordered[number] = self._clock()

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
