"""The lane below the devices: what the shared pipeline did, from the records of a study."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import optuna

from optuna_fleet.sampler_bridge import compat
from optuna_fleet.sampler_bridge.records import PIPELINE_PREFIX, PipelineSpan
from optuna_fleet.visualization import style
from optuna_fleet.visualization.bars import first_start

_LEAST_PX = 44


class Curve(Enum):
    """What the lane shows, from 0 at its bottom to 1 at its top; the value is for the legend."""

    BUSY = "preprocessors busy"
    STALLED = "trials wait for data"
    QUEUE = "queue of data"

    @property
    def colour(self) -> str:
        """Its colour."""
        return {"BUSY": "#9DB4C0", "STALLED": style.ALERT, "QUEUE": style.INK}[self.name]

    def share(self, span: PipelineSpan) -> float:
        """What it shows of a span."""
        return {"BUSY": span.busy, "STALLED": span.stalled, "QUEUE": span.queue}[self.name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Where the lane lies, in rows of devices, and what it shows.

    Attributes:
        spans: What was recorded, in seconds since the first flight; empty for no lane.
        num_devices: Rows above it.
    """

    spans: tuple[PipelineSpan, ...] = ()
    num_devices: int = 0

    @property
    def rows(self) -> int:
        """Rows it takes."""
        return math.ceil(_LEAST_PX / style.row_px(self.num_devices)) if self.spans else 0

    @property
    def bottom(self) -> float:
        """Where 0 lies; rows count downwards."""
        return self.num_devices + self.rows - 0.5 - (1 - style.BAR_HEIGHT) / 2

    @property
    def centre(self) -> float:
        """Where its label goes."""
        return self.num_devices + (self.rows - 1) / 2

    @property
    def height(self) -> float:
        """From 0 to 1."""
        return self.rows - (1 - style.BAR_HEIGHT)

    def place(self, share: float) -> float:
        """Where a share lies."""
        return self.bottom - self.height * min(max(share, 0.0), 1.0)


def lane_of(study: optuna.Study, num_devices: int) -> Lane:
    """The lane of a study; without spans if none are recorded."""
    zero = first_start(study)
    records = compat.study_records(study, PIPELINE_PREFIX).values()
    spans = [PipelineSpan(**record) for record in records]
    moved = (
        replace(span, start=max(0.0, span.start - zero), end=max(0.0, span.end - zero))
        for span in spans
    )
    return Lane(spans=tuple(sorted(moved, key=lambda s: s.start)), num_devices=num_devices)


def steps(spans: Sequence[PipelineSpan], curve: Curve) -> list[tuple[float, float] | None]:
    """Corners of a curve's steps, (time, share); None where nothing was recorded for a time."""
    corners: list[tuple[float, float] | None] = []
    end = None
    for span in spans:
        if end is not None and span.start > end + 0.001:
            corners.append(None)
        corners += [(time_s, curve.share(span)) for time_s in (span.start, span.end)]
        end = span.end
    return corners


def hover_text(span: PipelineSpan) -> str:
    """What a span says, in words."""
    lines = [
        f"<b>data</b>, {span.start:.1f} s to {span.end:.1f} s",
        f"{span.num_preprocessors:.1f} preprocessors, busy for {span.busy:.0%} of their time",
        f"short of memory for {span.blocked:.0%}",
        f"queues {span.queue:.0%} full",
        f"trials waited for {span.stalled:.0%} of their time",
    ]
    return "<br>".join(lines)
