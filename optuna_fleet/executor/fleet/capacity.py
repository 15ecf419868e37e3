"""What preprocessors can give to all trials together, measured while they are at work. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from optuna_fleet.pipeline.stats import PipelineStats
from optuna_fleet.wire.node_messages import PipelineReport

WINDOW_S = 5.0
"""Seconds in which trials read, from one measurement to the next."""

LEAST_BUSY = 0.5
"""Preprocessors that were busy for less of their time, all that there may be, limit nobody."""

LEAST_MADE = 32
"""Samples that each must have made: what it is about to finish is then a small part."""


class Capacity:
    """Samples that trials got for each second of a preprocessor's work, times all that may work.

    Where all were busy, that is what trials got. Where they had time to spare it is more, so that
    no plan can hold trials below what could be made for them: what it leaves idle raises the next
    measurement. A sample that was made once counts for each trial that got it, and those that had
    been kept count too, so that it errs to the large side.

    Attributes:
        samples_per_s: As measured last; None while that was not possible, or nobody was limited.
    """

    def __init__(self) -> None:
        self.samples_per_s: float | None = None
        self._base: dict[str, PipelineStats] = {}

    def heard(self, reports: Mapping[str, PipelineReport]) -> bool:
        """Take what agents have reported last; return whether that ends a window."""
        num_most, made, got, busy_s, most_s, lasted_s = 0, 0, 0, 0.0, 0.0, 0.0
        for agent, report in reports.items():
            done = report.stats.since(self._base.setdefault(agent, report.stats))
            num_most += report.num_most
            made += done.preprocessed
            got += done.consumed
            busy_s += done.use.busy_s
            most_s += report.num_most * done.use.active_s
            lasted_s = max(lasted_s, done.use.active_s)
        is_busy = busy_s >= LEAST_BUSY * most_s
        if lasted_s < WINDOW_S or (is_busy and made < LEAST_MADE * num_most):
            return False
        self._base = {agent: report.stats for agent, report in reports.items()}
        # What was made last is got only now, or later.
        self.samples_per_s = num_most * max(made, got) / busy_s if is_busy else None
        return True
