"""Chunks that other nodes own: asked of them, by processes that are no preprocessors."""

from __future__ import annotations

from collections import deque

from optuna_fleet.pipeline.exchange.peers import Peers
from optuna_fleet.pipeline.messages import ProduceChunk
from optuna_fleet.pipeline.server.instructions import Produce
from optuna_fleet.pipeline.server.workers import PreprocessorPool
from optuna_fleet.pipeline.spec import ChunkKey

NUM_FETCHERS = 4
"""Chunks that are asked of other nodes at a time; who waits for one is no preprocessor."""

FETCHED_SHARE = 1 / 8
"""Part of the budget that these may take: the rest is for what others wait for."""


class Fetching:
    """Orders chunks from other nodes; those that do not come are to be made here.

    Args:
        peers: The nodes that share chunks with this one.
        pool: Who asks them.
        memory_bytes: The budget.

    Attributes:
        failed: Orders for chunks that did not come.
    """

    def __init__(self, peers: Peers, pool: PreprocessorPool, memory_bytes: int) -> None:
        self._peers = peers
        self._pool = pool
        self._most_bytes = FETCHED_SHARE * memory_bytes
        self._flying: dict[ChunkKey, Produce] = {}
        self.failed: deque[Produce] = deque()

    def is_elsewhere(self, key: ChunkKey, nbytes: int) -> bool:
        """Returns whether to ask another node for a chunk of so many bytes.

        Not where memory is so short that nodes could wait for each other's.
        """
        return nbytes <= self._most_bytes and self._peers.source(key) is not None

    def has_room(self) -> bool:
        """Returns whether one more could be asked for."""
        if not (self._peers.share() and self._pool.has_room()):
            return False
        return sum(produce.max_bytes for produce in self._flying.values()) < self._most_bytes

    def order(self, produce: Produce, chunk_size: int) -> None:
        """Has a chunk asked for."""
        key, address, max_bytes = produce
        self._flying[key] = produce
        self._pool.give(
            ProduceChunk(
                key=key, chunk_size=chunk_size, address=address, max_bytes=max_bytes, fetch=True
            )
        )

    def settle(self, key: ChunkKey, *, has_failed: bool) -> bool:
        """Notes what became of an order; returns whether there was one."""
        produce = self._flying.pop(key, None)
        if produce is not None and has_failed:
            self.failed.append(produce)
        return produce is not None
