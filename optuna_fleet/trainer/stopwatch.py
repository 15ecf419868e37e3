"""Measures a trial's training rate over its first batches (FLEET B.3), while it trains."""

from __future__ import annotations

import time

from optuna_fleet.alloc.rates import PROFILE_BATCHES, rate_of

# FLEET's 48 batches are an upper limit; slow models stop as soon as enough were timed.
_ENOUGH = ((24, 0.25), (12, 1.0), (6, 5.0))


class Stopwatch:
    """Times batches until their rate is known."""

    def __init__(self, active: bool) -> None:
        self.active = active
        self.total_s = 0.0
        self._durations_s: list[float] = []
        self._samples: list[int] = []
        self._started = 0.0

    @property
    def is_unused(self) -> bool:
        """Whether nothing was timed yet."""
        return not self._durations_s

    def start(self) -> None:
        """A batch is about to be asked for."""
        self._started = time.perf_counter()

    def stop(self, samples: int, waited_s: float) -> float | None:
        """Count a trained batch of `samples` samples; return the rate (samples/s) once known.

        `waited_s` of that time went by waiting for data, which says nothing about the model.
        """
        duration_s = max(1e-9, time.perf_counter() - self._started - waited_s)
        self.total_s += duration_s
        self._durations_s.append(duration_s)
        self._samples.append(samples)
        if not self._is_enough():
            return None
        self.active = False
        return rate_of(self._durations_s, self._samples)

    def _is_enough(self) -> bool:
        timed = len(self._durations_s)
        return timed >= PROFILE_BATCHES or any(
            timed >= batches and self.total_s >= seconds for batches, seconds in _ENOUGH
        )
