"""What travels between agent, preprocessors and trainers; pickled, as all are our own forks."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from optuna_fleet.pipeline.exchange import Peer
from optuna_fleet.pipeline.spec import ChunkKey

PassId = tuple[Hashable, int]
"""A reader, and the number of one of its passes, which is all that the reader is told."""

MAX_TEXT = 10_000
"""Characters of a remote traceback that are kept, so that a message fits into one packet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkError:
    """Why a chunk could not be produced.

    Attributes:
        summary: One sentence: data set, index, the exception's type and message.
        traceback: The preprocessor's traceback; empty if there is none.
    """

    summary: str
    traceback: str = ""

    def text(self) -> str:
        """Returns the message to raise with."""
        if not self.traceback:
            return self.summary
        return f"{self.summary}\n\nTraceback in the preprocessor:\n{self.traceback}"


# Trainer -> agent


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPass:
    """A trainer begins to read an epoch at sample position ``start`` of the canonical order.

    It ``continues`` if it will read the next epoch afterwards. It is part of a run, but for those
    who read for nobody in particular.
    """

    pass_id: int
    name: str
    epoch: int
    start: int
    continues: bool
    run_id: int | None = None


class Advance(NamedTuple):
    """A pass moved: its first chunk still needed, what it wants, what it gives back.

    ``needed`` chunks are waited for right now, ``ahead`` ones are for the next batches, and
    ``num_consumed`` samples were used since it was last told. There are two of these messages per
    chunk and reader, and data classes take long to unpickle: so it is a tuple, as `ChunkReady`.
    """

    pass_id: int
    cursor: int
    needed: tuple[int, ...] = ()
    ahead: tuple[int, ...] = ()
    released: tuple[int, ...] = ()
    num_consumed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosePass:
    """A pass ended, early or not: what it held is free."""

    pass_id: int
    num_consumed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AskForStats:
    """Asks what the pipeline has done so far; answered by its `PipelineStats`."""


# Agent -> trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaOpened:
    """Comes first: how large the file is in which chunks lie, with its descriptor.

    Not its path below /proc: in another container, that may be another file.
    """

    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOpened:
    """Answers OpenPass with the number of samples per chunk of that epoch on this node.

    The reader may ask for ``num_ahead`` chunks before it needs them.
    """

    pass_id: int
    chunk_size: int
    num_ahead: int


class ChunkReady(NamedTuple):
    """Tells where a chunk lies.

    ``brief`` if memory is short: copy what is needed and give the chunk back at once.
    """

    pass_id: int
    chunk: int
    address: int
    nbytes: int
    brief: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseChunks:
    """Others can't go on: copy what is needed of the chunks this pass holds and release them."""

    pass_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkFailed:
    """The chunk could not be produced."""

    pass_id: int
    chunk: int
    error: ChunkError


# Agent -> preprocessor and back


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureSample:
    """Asks for the size of a preprocessed sample of a data set.

    Of the first ones of epoch 0, which are the same everywhere: so all nodes cut alike.
    """

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleMeasured:
    """Answers it.

    Attributes:
        name: The data set.
        sample_bytes: Bytes one sample takes in a chunk.
        header_bytes: Bytes a chunk takes beyond its samples.
        is_repeatable: The first sample was the same when it was made again.
        are_rows: Samples are rows of tensors.
        has_failed: A sample could not be had, so that other nodes may find another size.
    """

    name: str
    sample_bytes: int
    header_bytes: int = 0
    is_repeatable: bool = True
    are_rows: bool = False
    has_failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProduceChunk:
    """Work for a preprocessor.

    Attributes:
        key: The chunk.
        chunk_size: Samples of a chunk of this data set.
        address: Where to write it.
        max_bytes: What it may take there.
        source: Get it from this node.
    """

    key: ChunkKey
    chunk_size: int
    address: int
    max_bytes: int
    source: Peer | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AtWork:
    """A chunk takes long, but a sample of it was made just now: nobody is stuck."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkProduced:
    """A chunk lies where it was to be written.

    Attributes:
        key: The chunk.
        nbytes: The bytes that it takes.
        num_samples: Its samples.
        num_loaded: Samples whose beginning came from the decoded store.
        skipped: Indices of samples that raised and whose place another one took.
        complaint: What the first of these raised.
    """

    key: ChunkKey
    nbytes: int
    num_samples: int
    num_loaded: int = 0
    skipped: tuple[int, ...] = ()
    complaint: ChunkError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkNotFetched:
    """The owner of a chunk has refused, or is gone or slow: it is to be made here."""

    key: ChunkKey
    is_gone: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkOutgrew:
    """The chunk takes more bytes than was allowed; its samples are kept for a second order."""

    key: ChunkKey
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkNotProduced:
    """A sample of the chunk raised."""

    key: ChunkKey
    error: ChunkError


# What the pipeline of a node has done


@dataclass(slots=True, kw_only=True)
class PipelineStats:
    """What the pipeline of one node has done so far. Its server counts in one; others get copies.

    The times are sums; those in which nobody reads are left out.

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
        active_s: Seconds in which somebody read.
        running_s: Seconds that preprocessors ran, summed over them.
        busy_s: Seconds of these they were at work.
        blocked_s: Seconds of these they were idle since the budget allowed no more chunks.
        reading_s: Seconds that passes were open, summed over them.
        stalled_s: Seconds of these their readers waited for data.
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
    active_s: float = 0.0
    running_s: float = 0.0
    busy_s: float = 0.0
    blocked_s: float = 0.0
    reading_s: float = 0.0
    stalled_s: float = 0.0

    @property
    def sharing_factor(self) -> float:
        """Samples consumed per sample preprocessed; 0.0 before the first."""
        return _ratio(self.consumed, self.preprocessed)

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

    def since(self, last: PipelineStats) -> PipelineStats:
        """Returns what was done after ``last``; what is so now stays as it is."""
        return replace(self, **{each: getattr(self, each) - getattr(last, each) for each in _DONE})

    def plus(self, other: PipelineStats) -> PipelineStats:
        """Returns both together: two nodes' pipelines."""
        names = (*_DONE, *_NOW)
        both = {name: getattr(self, name) + getattr(other, name) for name in names}
        return replace(self, **both, peak_bytes=max(self.peak_bytes, other.peak_bytes))

    def gone(self) -> PipelineStats:
        """Returns what counts on when the node is gone: what was done, not what it had."""
        nothing: dict[str, Any] = dict.fromkeys(_NOW, 0)
        return replace(self, **nothing)


_NOW = ("resident_bytes", "lent_bytes", "decoded_bytes")
_DONE = [e.name for e in fields(PipelineStats) if e.name not in (*_NOW, "peak_bytes")]


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
