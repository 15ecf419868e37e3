"""What the pipeline of a node has done."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple


class PipelineUse(NamedTuple):
    """How preprocessors and readers spent their time; time in which nobody reads is left out.

    Sums over time, so that the difference of two of them says what happened in between.

    Attributes:
        active_s: Seconds in which somebody read.
        running_s: Seconds that preprocessors ran, summed over them.
        busy_s: Seconds of these they were at work.
        blocked_s: Seconds of these they were idle since the budget allowed no more chunks.
        reading_s: Seconds that passes were open, summed over them.
        stalled_s: Seconds of these their readers waited for data.
    """

    active_s: float = 0.0
    running_s: float = 0.0
    busy_s: float = 0.0
    blocked_s: float = 0.0
    reading_s: float = 0.0
    stalled_s: float = 0.0

    @property
    def num_preprocessors(self) -> float:
        """Mean number of preprocessors."""
        return _ratio(self.running_s, self.active_s)

    @property
    def busy_share(self) -> float:
        """Share of the preprocessors' time at work."""
        return _ratio(self.busy_s, self.running_s)

    @property
    def blocked_share(self) -> float:
        """Share of their time idle, as the budget allowed no more."""
        return _ratio(self.blocked_s, self.running_s)

    @property
    def stalled_share(self) -> float:
        """Share of the readers' time that they waited for data."""
        return _ratio(self.stalled_s, self.reading_s)

    def plus(self, other: PipelineUse, factor: float = 1.0) -> PipelineUse:
        """Returns the sum of both, the other one multiplied."""
        pairs = zip(self, other, strict=True)
        return PipelineUse(*(mine + factor * theirs for mine, theirs in pairs))

    def since(self, last: PipelineUse) -> PipelineUse:
        """Returns what was added after ``last``."""
        return self.plus(last, -1.0)


_UNUSED = PipelineUse()


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


@dataclass(slots=True, kw_only=True)
class PipelineStats:
    """What the pipeline of one node has done so far. Its server counts in one; others get copies.

    Attributes:
        preprocessed: Samples preprocessed, repetitions included.
        consumed: Samples that trials consumed, as reported with each chunk.
        resident_bytes: Bytes of preprocessed data now, in memory or in the ``spill_dir``.
        peak_bytes: The most that it has been, on any one node.
        num_dropped: Chunks dropped to make room, or as nobody would come to them.
        num_lost: Preprocessors that died.
        repeated: Samples of ``preprocessed`` that had been preprocessed before and dropped.
        num_loaded: Samples whose beginning came from the decoded store.
        num_received: Samples that other nodes preprocessed.
        num_skipped: Samples that raised and whose place others took, in all epochs.
        lent_bytes: Bytes of ``resident_bytes`` that readers hold, which can't be dropped.
        decoded_bytes: Bytes of ``resident_bytes`` in the decoded store.
        use: How preprocessors and readers spent their time.
    """

    preprocessed: int = 0
    consumed: int = 0
    resident_bytes: int = 0
    peak_bytes: int = 0
    num_dropped: int = 0
    num_lost: int = 0
    repeated: int = 0
    num_loaded: int = 0
    num_received: int = 0
    num_skipped: int = 0
    lent_bytes: int = 0
    decoded_bytes: int = 0
    use: PipelineUse = _UNUSED

    @property
    def sharing_factor(self) -> float:
        """Samples consumed per sample preprocessed; 0.0 before the first."""
        return self.consumed / self.preprocessed if self.preprocessed else 0.0

    def since(self, last: PipelineStats) -> PipelineStats:
        """Returns what was done after ``last``; what is so now stays as it is."""
        done = {name: getattr(self, name) - getattr(last, name) for name in _DONE}
        return replace(self, **done, use=self.use.since(last.use))

    def plus(self, other: PipelineStats) -> PipelineStats:
        """Returns both together: two nodes' pipelines."""
        names = (*_DONE, *_NOW)
        both = {name: getattr(self, name) + getattr(other, name) for name in names}
        peak_bytes = max(self.peak_bytes, other.peak_bytes)
        return replace(self, **both, peak_bytes=peak_bytes, use=self.use.plus(other.use))

    def gone(self) -> PipelineStats:
        """Returns what counts on when the node is gone: what was done, not what it had."""
        nothing: dict[str, Any] = dict.fromkeys(_NOW, 0)
        return replace(self, **nothing)


_NOW = ("resident_bytes", "lent_bytes", "decoded_bytes")
_DONE = tuple(
    each.name for each in fields(PipelineStats) if each.name not in (*_NOW, "peak_bytes", "use")
)
