"""What the pipeline reports while a call runs, cut into spans for the study to keep."""

from __future__ import annotations

from collections.abc import Callable

from optuna_fleet.sampler_bridge.ledger import PipelineSpan
from optuna_fleet.wire.node_messages import PipelineReport

MIN_SPAN_S = 2.0
"""No span is shorter, except the last."""

RESOLUTION = 64
"""A span takes at least this part of the time since the call began: a sweep of any length has
little more than as many of them (630 for 100 hours)."""


class PipelineLog:
    """Turns reports, which count from the start of the fleet, into spans. Pure.

    Args:
        record: Given each span.
        base: The report at the beginning of the call.
        began: When that was, in seconds since the epoch.
    """

    def __init__(
        self, record: Callable[[PipelineSpan], None], base: PipelineReport, began: float
    ) -> None:
        self._record = record
        self._base = self._last = base
        self._began = self._noted = began

    def note(self, report: PipelineReport, now: float) -> None:
        """A report came in; it ends a span if enough time has passed."""
        if now - self._noted >= max(MIN_SPAN_S, (now - self._began) / RESOLUTION):
            self._end_span(report, now)

    def finish(self, report: PipelineReport, now: float) -> PipelineReport:
        """The call is over; returns what the pipeline did for it."""
        self._end_span(report, now)
        return report.since(self._base)

    def _end_span(self, report: PipelineReport, now: float) -> None:
        use = report.use.since(self._last.use)
        start, self._noted, self._last = self._noted, now, report
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
