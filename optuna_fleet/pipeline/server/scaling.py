"""How many preprocessors run now. Pure: windows of measurements go in, numbers come out.

FLEET measures the throughput of 1, 2, 4, ... preprocessors before training and takes the fewest
that meet the trainers' demand. Here the same is found out while training: the number is doubled
while readers wait for data and the last doubling paid; then the fewest are kept that do as well.
It shrinks after a time with little to do, and each time that proves wrong it waits longer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

START = 1
"""Preprocessors at the beginning."""

CHUNKS_PER_WINDOW = 4
"""Chunks that each preprocessor makes in a window that is judged by its throughput."""

MIN_WINDOW_S = 0.5
"""Starting a process takes time too: nothing is decided faster than this."""

IDLE_WINDOW_S = 5.0
"""After so long a window is judged even with hardly a chunk made, if that is for lack of work."""

STARVED = 0.1
"""Readers wait too often if one of them does for this share of the time."""

SATURATED = 0.85
"""More preprocessors can only help if those there are were busy for this share of the time."""

GAIN = 1.2
"""A doubling that brings less than this factor was the last one."""

CLOSE = 0.95
"""As good as the best: the fewest preprocessors with this share of its throughput are kept."""

LIGHT = 0.6
"""There are too many if they are busy for less than this share of the time..."""

AIM = 0.75
"""...and fewer would be busy for no more than this share. Far from `SATURATED`, so that the
next window doesn't ask for them back."""

CHANGED = 1.5
"""A load that differs by this factor is another one: what was learnt no longer holds."""

PATIENCE_S = 10.0
"""Seconds of little work before preprocessors are ended; doubled each time that was a mistake."""

MAX_PATIENCE_S = 640.0
"""The most that it grows to."""

RETRY_S = 60.0
"""Seconds of hunger after which half as many are tried, and more again; doubled each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What was measured over some time in which the number of preprocessors stayed the same.

    Attributes:
        elapsed_s: How long.
        num_chunks: Chunks that were made.
        work_s: The samples in them, each weighed with what one of its data set cost at first:
            throughput that does not depend on the mixture of data sets.
        busy_s: Seconds preprocessors were at work, summed over them.
        starved_s: Seconds in which at least one reader waited for data.
        num_readers: Mean number of open passes.
    """

    elapsed_s: float
    num_chunks: int
    work_s: float
    busy_s: float
    starved_s: float
    num_readers: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingDecision:
    """How many preprocessors there are to be, and why."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class _Throughput:
    rate: float
    num_readers: float


class Scaling:
    """Decides how many preprocessors run.

    Args:
        limit: The most.

    Attributes:
        number: How many there are to be now; 0 only while there is nothing to do.
    """

    def __init__(self, *, limit: int) -> None:
        assert limit >= 1, limit
        self._limit = self._ceiling = limit
        self.number = START
        self._measured: dict[int, _Throughput] = {}  # while all of them were busy
        self._doubled_from: int | None = None
        self._hungry_s = 0.0
        self._retry_s = RETRY_S
        self._light_s = 0.0
        self._patience_s = PATIENCE_S
        self._has_shrunk = False

    def is_complete(self, window: Window) -> bool:
        """Returns whether the window can be judged."""
        if window.elapsed_s < MIN_WINDOW_S:
            return False
        if window.num_chunks >= CHUNKS_PER_WINDOW * max(1, self.number):
            return True
        return window.elapsed_s >= IDLE_WINDOW_S and self._load(window) < LIGHT

    def work_came(self) -> ScalingDecision | None:
        """Tells that there is work; the answer is None if there is somebody for it."""
        return None if self.number else self._grow(1, "there is work again")

    def judge(self, window: Window) -> ScalingDecision:
        """Decides after a complete window, all of it with the present number."""
        load, starved = self._load(window), window.starved_s / window.elapsed_s
        before, self._doubled_from = self._doubled_from, None
        if load > LIGHT or starved > STARVED:
            self._light_s = 0.0
        if starved > STARVED and load >= SATURATED:
            return self._starved(window, before)
        if starved > STARVED or load > LIGHT:
            return self._decision(f"busy for {load:.0%} of the time")
        return self._light(window, load)

    def _load(self, window: Window) -> float:
        return window.busy_s / (max(1, self.number) * window.elapsed_s)

    def _starved(self, window: Window, before: int | None) -> ScalingDecision:
        now = _Throughput(window.work_s / window.elapsed_s, window.num_readers)
        known = self._measured.setdefault(self.number, now)
        if _differs(known.rate, now.rate) or _differs(known.num_readers, now.num_readers):
            self._forget()
            self._measured[self.number] = now
        fewer = self._measured.get(before or 0)
        if before and fewer and now.rate < fewer.rate * GAIN ** math.log2(self.number / before):
            return self._settle()
        if self.number >= self._ceiling:
            return self._hungry(window)
        doubled_from = self.number
        grown = self._grow(min(2 * self.number, self._ceiling), "readers wait for data")
        self._doubled_from = doubled_from
        return grown

    def _hungry(self, window: Window) -> ScalingDecision:
        """No more are allowed, or more were no help; but the load may not be what it was."""
        self._hungry_s += window.elapsed_s
        if self._hungry_s >= self._retry_s and self._limit > 1:
            self._forget()
            self._retry_s *= 2
            self.number = max(1, self.number // 2)
            return self._decision("trying whether fewer do as well")
        return self._decision("readers wait for data, but more are not allowed or no help")

    def _forget(self) -> None:
        self._measured.clear()
        self._ceiling = self._limit
        self._hungry_s = 0.0

    def _settle(self) -> ScalingDecision:
        """The last doubling did not pay: the fewest that do as well as any."""
        best = max(known.rate for known in self._measured.values())
        self.number = min(n for n, known in self._measured.items() if known.rate >= CLOSE * best)
        self._ceiling = self.number
        return self._decision("readers wait for data, but more make no more of it")

    def _light(self, window: Window, load: float) -> ScalingDecision:
        self._light_s += window.elapsed_s
        enough = math.ceil(self.number * load / AIM)
        if enough < self.number and self._light_s >= self._patience_s:
            self.number, self._light_s, self._has_shrunk = enough, 0.0, True
        return self._decision(f"busy for only {load:.0%} of the time")

    def _grow(self, number: int, reason: str) -> ScalingDecision:
        if self._has_shrunk:
            self._patience_s = min(2 * self._patience_s, MAX_PATIENCE_S)
            self._has_shrunk = False
        self.number = number
        return self._decision(reason)

    def _decision(self, reason: str) -> ScalingDecision:
        return ScalingDecision(number=self.number, reason=reason)


def _differs(one: float, other: float) -> bool:
    return max(one, other) > CHANGED * min(one, other)
