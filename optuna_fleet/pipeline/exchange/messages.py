"""What travels between an agent and its own exchanger; pickled, as both are of one fork."""

from __future__ import annotations

from dataclasses import dataclass

from optuna_fleet.pipeline.exchange.scheme import Plan
from optuna_fleet.pipeline.spec import ChunkKey

# Agent -> exchanger


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchChunk:
    """Get a chunk from a node; by this version of the plan.

    Its file may take ``max_bytes``, in the spill folder if there is one.
    """

    key: ChunkKey
    chunk_size: int
    max_bytes: int
    node: int
    version: int
    spill_dir: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AskSize:
    """Ask a node how many samples make a chunk of a data set."""

    name: str
    node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RateMeasured:
    """What this node's preprocessors achieve together."""

    samples_per_s: float
    sample_bytes: float
    chunk_samples: int


# Exchanger -> agent


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeReady:
    """Every node came or is done without.

    Attributes:
        up: Those that came and can be asked.
        problem: What kept the others away; empty if none are missing.
    """

    up: tuple[int, ...]
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkChanged:
    """A node can be asked, or can not."""

    node: int
    up: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeTold:
    """Answers AskSize; ``chunk_size`` is None if the node did not answer."""

    name: str
    chunk_size: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkFetched:
    """Carries the sealed file of a chunk that another node made."""

    key: ChunkKey


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTooLarge:
    """The chunk takes more than the fetch allowed."""

    key: ChunkKey
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkNotFetched:
    """The node did not give the chunk."""

    key: ChunkKey
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChosen:
    """The measurements have decided."""

    plan: Plan
    reason: str
