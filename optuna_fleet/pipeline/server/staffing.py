"""How many preprocessors run: more while readers starve; those that stay idle are ended."""

from __future__ import annotations

import logging
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


_NOTHING = Levels()


class Meter:
    """Sums levels over time, in which somebody reads. Pure: the time is an argument.

    Attributes:
        now_s: When the levels were observed.
        levels: The levels since then.
        use: The sums so far.
    """

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s
        self.levels = _NOTHING
        self.use = PipelineUse()

    def advance(self, now_s: float) -> None:
        """Adds the time since the last call, in which the levels were as they are."""
        passed_s, levels, use = max(0.0, now_s - self.now_s), self.levels, self.use
        self.now_s = now_s
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


class Staffing:
    """Doubles the number of preprocessors as long as readers wait and all of them are busy.

    If it is not adaptive, there are as many as the limit as soon as there is work.

    Attributes:
        number: How many there may be now.
    """

    def __init__(self, limit: int, *, is_adaptive: bool) -> None:
        self._limit = limit
        self._is_adaptive = is_adaptive
        self.number = 1 if is_adaptive else limit
        self._num_chunks = 0
        self._began: tuple[float, float, float] | None = None

    def ended(self, running: int) -> None:
        """Those that were idle have been ended, and there are so many left."""
        if self._is_adaptive:
            self.number = min(self.number, max(1, running))

    def chunk_made(self, use: PipelineUse, *, running: int, has_fresh: bool) -> bool:
        """Judges after each chunk; returns whether there may be more from now on.

        It does not while some still load the data sets (``has_fresh``): that tells nothing.
        """
        now = use.active_s, use.busy_s, use.starved_s
        if not self._is_adaptive:
            return False
        self.ended(running)
        if has_fresh or self._began is None:
            self._began, self._num_chunks = now, 0
            return False
        self._num_chunks += 1
        elapsed_s, busy_s, starved_s = (a - b for a, b in zip(now, self._began, strict=True))
        if elapsed_s < MIN_WINDOW_S or self._num_chunks < CHUNKS_PER_WINDOW * self.number:
            return False
        self._began, self._num_chunks = now, 0
        busy = busy_s / (self.number * elapsed_s)
        if self.number >= self._limit or busy < SATURATED or starved_s < STARVED * elapsed_s:
            return False
        self.number = min(2 * self.number, self._limit)
        _logger.debug(
            "%d preprocessors: those there were, were busy for %.0f %% of the time while readers "
            "waited for %.0f %% of it",
            *(self.number, 100 * busy, 100 * starved_s / elapsed_s),
        )
        return True
