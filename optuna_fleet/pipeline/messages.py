"""What travels between agent, preprocessors and trainers; pickled, as all are our own forks."""

from __future__ import annotations

from dataclasses import dataclass

from optuna_fleet.pipeline.spec import ChunkKey

MAX_TEXT = 20_000
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

    It ``continues`` if it will read the next epoch afterwards.
    """

    pass_id: int
    name: str
    epoch: int
    start: int
    continues: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Advance:
    """A pass moved: its first chunk still needed, what it wants, what it gives back.

    ``needed`` chunks are waited for right now, ``ahead`` ones are for the next batches.
    """

    pass_id: int
    cursor: int
    needed: tuple[int, ...] = ()
    ahead: tuple[int, ...] = ()
    released: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosePass:
    """A pass ended, early or not: what it held is free. ``waited_s`` is its time without data."""

    pass_id: int
    num_consumed: int
    waited_s: float


# Agent -> trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOpened:
    """Answers OpenPass with the number of samples per chunk of that data set on this node."""

    pass_id: int
    chunk_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkReady:
    """Carries a chunk's file descriptor."""

    pass_id: int
    chunk: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkFailed:
    """The chunk could not be produced."""

    pass_id: int
    chunk: int
    error: ChunkError


# Agent -> preprocessor and back


@dataclass(frozen=True, slots=True, kw_only=True)
class ProduceChunk:
    """Work for a preprocessor, who measures the first sample if there is no ``chunk_size``."""

    key: ChunkKey
    chunk_size: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleMeasured:
    """The size of a preprocessed sample; sent before a chunk that was ordered without a size."""

    name: str
    sample_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkProduced:
    """Carries the sealed file of a chunk."""

    key: ChunkKey
    num_samples: int
    busy_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkNotProduced:
    """A sample of the chunk raised."""

    key: ChunkKey
    error: ChunkError
