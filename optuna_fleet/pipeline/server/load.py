"""How busy preprocessors and readers are, and how many preprocessors that asks for."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import NamedTuple

from optuna_fleet.pipeline.stats import PipelineUse

CHUNKS_PER_WINDOW = 4
"""Chunks that each preprocessor makes before the number is judged."""

MIN_WINDOW_S = 0.5
"""Starting a process takes time too: nothing is decided faster than this."""

STARVED = 0.1
"""Readers wait too often if one of them does for this share of the time."""

SATURATED = 0.85
"""More preprocessors can only help if those there are were busy for this share of the time."""

_logger = logging.getLogger(__name__)


class Levels(NamedTuple):
    """What is so from now on, until the next event.

    Attributes:
        running: Preprocessors.
        busy: Those at work.
        is_blocked: There is work, but it does not fit into the budget.
        reading: Open passes, those that wait for their first answer included.
        stalled: Those whose reader waits for data.
        ready: Chunks ready ahead of the passes, summed over them.
        window: The most that this could be.
    """

    running: int = 0
    busy: int = 0
    is_blocked: bool = False
    reading: int = 0
    stalled: int = 0
    ready: int = 0
    window: int = 0


class Load:
    """Sums levels over time, in which somebody reads. Pure: the time is an argument.

    As long as readers wait and all preprocessors are busy, twice as many are wanted. If it is not
    adaptive, as many as the limit.

    Attributes:
        levels: What is so since it was told of the time.
        use: The sums so far.
        num_wanted: How many preprocessors there may be now.
    """

    def __init__(self, now_s: float, limit: int, *, is_adaptive: bool) -> None:
        self.levels = Levels()
        self.use = PipelineUse()
        self.num_wanted = 1 if is_adaptive else limit
        self._now_s = now_s
        self._limit = limit
        self._is_adaptive = is_adaptive
        self._num_chunks = 0
        self._began: PipelineUse | None = None

    def advance(self, now_s: float) -> None:
        """Adds the time since the last call, in which the levels were as they are."""
        passed_s, levels, use = max(0.0, now_s - self._now_s), self.levels, self.use
        self._now_s = now_s
        if not levels.reading or not passed_s:
            return
        use.active_s += passed_s
        use.running_s += levels.running * passed_s
        use.busy_s += levels.busy * passed_s
        use.reading_s += levels.reading * passed_s
        use.stalled_s += levels.stalled * passed_s
        use.ready_s += levels.ready * passed_s
        use.window_s += levels.window * passed_s
        if levels.is_blocked:
            use.blocked_s += (levels.running - levels.busy) * passed_s
        if levels.stalled:
            use.starved_s += passed_s

    def are_left(self, running: int) -> None:
        """Those that were idle have been ended, and so many run."""
        if self._is_adaptive:
            self.num_wanted = min(self.num_wanted, max(1, running))

    def chunk_made(self, *, running: int, has_fresh: bool) -> None:
        """Judges, but not while some still load the data sets (``has_fresh``)."""
        if not self._is_adaptive:
            return
        self.are_left(running)
        self._num_chunks += 1
        if has_fresh or self._began is None:
            self._began, self._num_chunks = replace(self.use), 0
            return
        since, number = self.use.since(self._began), self.num_wanted
        if since.active_s < MIN_WINDOW_S or self._num_chunks < CHUNKS_PER_WINDOW * number:
            return
        self._began, self._num_chunks = replace(self.use), 0
        busy, starved = since.busy_s / (number * since.active_s), since.starved_s / since.active_s
        if busy >= SATURATED and starved >= STARVED and number < self._limit:
            self.num_wanted = min(2 * number, self._limit)
            _logger.debug(
                "%d preprocessors: those there were, were busy for %.0f %% of the time while "
                "readers waited for %.0f %% of it",
                *(self.num_wanted, 100 * busy, 100 * starved),
            )
