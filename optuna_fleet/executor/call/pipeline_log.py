"""What the shared pipeline did in a call, in spans."""

from __future__ import annotations

from collections.abc import Callable

from optuna_fleet.pipeline.stats import PipelineStats
from optuna_fleet.sampler_bridge.records import PipelineSpan

MIN_SPAN_S = 2.0
"""No span is shorter, except the last."""

RESOLUTION = 64
"""A span takes at least this part of the time since the call began: a sweep of any length has
little more than as many of them (630 for 100 hours)."""


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
