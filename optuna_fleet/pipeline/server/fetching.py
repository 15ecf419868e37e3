"""Chunks that other nodes own: asked of them, by processes that are no preprocessors."""

from __future__ import annotations

from optuna_fleet.pipeline.exchange.peers import Peers
from optuna_fleet.pipeline.exchange.plan import Peer
from optuna_fleet.pipeline.messages import ProduceChunk
from optuna_fleet.pipeline.server.allocator import Space
from optuna_fleet.pipeline.server.workers import PreprocessorPool
from optuna_fleet.pipeline.spec import ChunkKey

NUM_FETCHERS = 4
"""Chunks that are asked of other nodes at a time; who waits for one is no preprocessor."""

FETCHED_SHARE = 1 / 8
"""Part of the memory for chunks that these may take: the rest is for what others wait for."""


class Fetching:
    """Orders chunks from other nodes; those that do not come are to be made here."""

    def __init__(self, peers: Peers | None, pool: PreprocessorPool, space: Space) -> None:
        self._peers = peers
        self._pool = pool
        self._space = space
        self._flying: dict[ChunkKey, ProduceChunk] = {}
        self._failed: set[ChunkKey] = set()

    def source(self, key: ChunkKey, nbytes: int) -> Peer | None:
        """Returns whom to ask for a chunk of so many bytes; None if it is to be made here.

        So it is where memory is so short that nodes could wait for each other's.
        """
        if self._peers is None or nbytes > self._most_bytes or key in self._failed:
            return None
        return self._peers.source(key)

    def has_room(self) -> bool:
        """Returns whether one more could be asked for."""
        if self._peers is None or not (self._peers.plan.is_shared and self._pool.has_room()):
            return False
        return sum(work.max_bytes for work in self._flying.values()) < self._most_bytes

    @property
    def _most_bytes(self) -> float:
        return FETCHED_SHARE * self._space.nbytes

    def give(self, work: ProduceChunk) -> None:
        """Has a chunk asked for."""
        self._flying[work.key] = work
        self._pool.give(work)

    def settle(self, key: ChunkKey) -> None:
        """Notes that an order for a chunk, to whomever, has come to an end."""
        self._failed.discard(key)
        self._flying.pop(key, None)

    def failed(self, key: ChunkKey, *, is_gone: bool = False) -> bool:
        """Notes that a chunk did not come, if it was ordered here; returns whether it was.

        It did not since its owner has refused, or died over it here, or ``is_gone``, or slow.
        """
        if key not in self._flying:
            return False
        source = self._flying.pop(key).source
        if is_gone and source is not None and self._peers is not None:
            self._peers.leave_out(source)
        self._failed.add(key)
        return True
