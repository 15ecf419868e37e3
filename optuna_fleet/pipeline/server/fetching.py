"""Chunks that other nodes own: asked of them, by processes that are no preprocessors."""

from __future__ import annotations

from collections import deque

from optuna_fleet.pipeline.exchange.peers import Peers
from optuna_fleet.pipeline.exchange.plan import Peer
from optuna_fleet.pipeline.messages import ProduceChunk
from optuna_fleet.pipeline.server.epochs import Order
from optuna_fleet.pipeline.server.workers import PreprocessorPool
from optuna_fleet.pipeline.spec import ChunkKey

NUM_FETCHERS = 4
"""Chunks that are asked of other nodes at a time; who waits for one is no preprocessor."""

FETCHED_SHARE = 1 / 8
"""Part of the budget that these may take: the rest is for what others wait for."""


class Fetching:
    """Orders chunks from other nodes; those that do not come are to be made here.

    Args:
        peers: The nodes that share chunks with this one; None if there are none.
        pool: Who asks them.
        memory_bytes: The budget.

    Attributes:
        failed: Orders for chunks that did not come.
    """

    def __init__(self, peers: Peers | None, pool: PreprocessorPool, memory_bytes: int) -> None:
        self._peers = peers
        self._pool = pool
        self._most_bytes = FETCHED_SHARE * memory_bytes
        self._flying: dict[ChunkKey, tuple[Order, Peer | None]] = {}
        self.failed: deque[Order] = deque()

    def is_elsewhere(self, key: ChunkKey, nbytes: int) -> bool:
        """Returns whether to ask another node for a chunk of so many bytes.

        Not where memory is so short that nodes could wait for each other's.
        """
        return nbytes <= self._most_bytes and self._source(key) is not None

    def has_room(self) -> bool:
        """Returns whether one more could be asked for."""
        if self._peers is None or not (self._peers.share() and self._pool.has_room()):
            return False
        flying = sum(order.max_bytes for order, _ in self._flying.values())
        return flying < self._most_bytes

    def order(self, order: Order, chunk_size: int) -> None:
        """Has a chunk asked for."""
        key, address, max_bytes = order
        source = self._source(key)
        self._flying[key] = order, source
        self._pool.give(
            ProduceChunk(
                key=key,
                chunk_size=chunk_size,
                address=address,
                max_bytes=max_bytes,
                source=source,
            )
        )

    def settle(self, key: ChunkKey, *, has_failed: bool, is_gone: bool = False) -> bool:
        """Notes what became of an order; returns whether there was one.

        Args:
            key: The chunk.
            has_failed: It did not come.
            is_gone: Since its owner is gone, or slow.
        """
        if key not in self._flying:
            return False
        order, source = self._flying.pop(key)
        if is_gone and source is not None and self._peers is not None:
            self._peers.leave_out(source)
        if has_failed:
            self.failed.append(order)
        return True

    def _source(self, key: ChunkKey) -> Peer | None:
        return None if self._peers is None else self._peers.source(key)
