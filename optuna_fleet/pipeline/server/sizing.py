"""How data sets are cut into chunks: by the bytes of a few samples."""

from __future__ import annotations

from collections import Counter

from optuna_fleet.pipeline import limits
from optuna_fleet.pipeline.exchange.peers import Peers
from optuna_fleet.pipeline.messages import MeasureSample, SampleMeasured
from optuna_fleet.pipeline.server.store import MAX_DEATHS, ChunkStore
from optuna_fleet.pipeline.spec import (
    MIN_CHUNK_SAMPLES,
    TOGETHER,
    ChunkKey,
    PipelineSpec,
    choose_chunk_size,
)

HEADER_SPARE_BYTES = 1024
"""Room for what a chunk's header holds beyond that of a single sample."""


class Sizing:
    """Has data sets measured, and tells the store how to cut them, in chunks of ``chunk_bytes``.

    Attributes:
        found: By data set, what its first samples told.
    """

    def __init__(
        self, spec: PipelineSpec, store: ChunkStore, chunk_bytes: int, peers: Peers | None
    ) -> None:
        self._spec = spec
        self._store = store
        self._chunk_bytes = chunk_bytes
        self._peers = peers
        self._wanted: dict[str, ChunkKey] = {}
        self._flying: set[str] = set()
        self._deaths: Counter[str] = Counter()
        self.found: dict[str, SampleMeasured] = {}

    @property
    def num_measuring(self) -> int:
        """Data sets being measured; somebody waits for each."""
        return len(self._flying)

    def knows(self, name: str, epoch: int) -> bool:
        """Returns whether it is known how to cut a data set; if not, this epoch's samples tell."""
        if name not in self.found and name not in self._flying:
            self._wanted.setdefault(name, ChunkKey(name, epoch, 0))
        return name in self.found

    @property
    def wanted(self) -> list[str]:
        """The data sets that are to be measured."""
        return list(self._wanted)

    def order(self, name: str) -> MeasureSample:
        """Returns the order for one of them."""
        key = self._wanted.pop(name)
        self._flying.add(name)
        decider = self._peers.decider() if self._peers is not None else None
        return MeasureSample(key=key, decider=decider)

    def measured(self, message: SampleMeasured) -> None:
        """Samples of a data set tell how to cut it."""
        name = message.key.name
        self._flying.discard(name)
        self.found[name] = message
        dataset = self._spec.dataset(name)
        size = message.chunk_size or choose_chunk_size(
            num_samples=dataset.num_samples,
            sample_bytes=message.sample_bytes,
            chunk_bytes=self._chunk_bytes,
            least=TOGETHER if dataset.batched else MIN_CHUNK_SAMPLES,
        )
        content = size * message.sample_bytes + message.header_bytes + HEADER_SPARE_BYTES
        self._store.set_size(
            name, num_samples=dataset.num_samples, chunk_size=size, chunk_bytes=content
        )

    def lost(self, key: ChunkKey) -> SampleMeasured | None:
        """Somebody died over the order; returns a guess if that was once too often."""
        self._flying.discard(key.name)
        self._deaths[key.name] += 1
        if self._deaths[key.name] < MAX_DEATHS:
            self._wanted[key.name] = key
            return None
        # Nobody will tell the size now. Guess, so that readers get to hear of the failure.
        guess = limits.guess_sample_bytes(self._chunk_bytes)
        return SampleMeasured(key=key, sample_bytes=guess, header_bytes=0)

    def is_measuring(self, name: str) -> bool:
        """Returns whether a data set is being measured."""
        return name in self._flying
