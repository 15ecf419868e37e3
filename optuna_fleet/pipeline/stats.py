"""What the pipeline of a node has done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStats:
    """What the pipeline of one node has done so far.

    Attributes:
        preprocessed: Samples preprocessed, repetitions included.
        consumed: Samples that trials consumed, as reported at the end of each pass.
        busy_s: Seconds preprocessors spent on chunks, summed over them.
        waited_s: Seconds trainers waited for data, summed over them.
        resident_bytes: Bytes of the chunks in memory now.
        peak_bytes: The most that it has been.
        num_dropped: Chunks dropped to make room.
        num_lost: Preprocessors that died.
    """

    preprocessed: int
    consumed: int
    busy_s: float
    waited_s: float
    resident_bytes: int
    peak_bytes: int
    num_dropped: int
    num_lost: int

    @property
    def sharing_factor(self) -> float:
        """Samples consumed per sample preprocessed; 0.0 before the first."""
        return self.consumed / self.preprocessed if self.preprocessed else 0.0


@dataclass(slots=True)
class Counts:
    """The same while it is being counted."""

    preprocessed: int = 0
    consumed: int = 0
    busy_s: float = 0.0
    waited_s: float = 0.0
    peak_bytes: int = 0
    num_dropped: int = 0

    def snapshot(self, *, resident_bytes: int, num_lost: int) -> PipelineStats:
        """Returns the counts so far."""
        return PipelineStats(
            preprocessed=self.preprocessed,
            consumed=self.consumed,
            busy_s=self.busy_s,
            waited_s=self.waited_s,
            resident_bytes=resident_bytes,
            peak_bytes=self.peak_bytes,
            num_dropped=self.num_dropped,
            num_lost=num_lost,
        )
