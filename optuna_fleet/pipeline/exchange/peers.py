"""A node's way to the others' chunks: asks a chunk's owner, once, for a bounded time."""

from __future__ import annotations

import select
import time
from typing import NamedTuple

from optuna_fleet.exceptions import ProtocolError
from optuna_fleet.pipeline.exchange.board import Board
from optuna_fleet.pipeline.exchange.plan import Peer, Plan
from optuna_fleet.pipeline.spec import ChunkKey, PipelineSpec
from optuna_fleet.wire.channel import Channel, connect
from optuna_fleet.wire.invitation import Invitation

PATIENCE_S = 10.0
"""A peer that has not answered by then is done without."""
_MOST_KNOWN = 10_000  # owners, which take a hash per node to find


class AskForChunk(NamedTuple):
    """Asks a chunk's owner for it; its bytes must be what they would be here.

    The name of a data set alone asks for the size of its chunks.
    """

    key: ChunkKey
    chunk_size: int
    is_finished: bool


class Answer(NamedTuple):
    """Says how many samples make a chunk, or whether the bytes of one follow."""

    chunk_size: int | None = None
    follows: bool = False


class Peers:
    """The other nodes, as an agent and its forks see them.

    Args:
        agent: The incarnation of this node's agent.
        secret: Of the sweep.
        spec: The data sets.
        patience_s: How long to wait for an answer.
    """

    def __init__(
        self, agent: str, secret: bytes, spec: PipelineSpec, patience_s: float = PATIENCE_S
    ) -> None:
        self.board = Board()
        self.spec = spec
        self.agent = agent
        self.secret = secret
        self._patience_s = patience_s
        self._channels: dict[Peer, Channel] = {}
        self._owners: tuple[Plan, dict[ChunkKey, Peer | None]] = Plan(), {}

    def share(self) -> bool:
        """Returns whether there is anybody to get chunks from."""
        plan = self.board.plan()
        return plan.scheme != "local" and len(plan.peers) > 1

    def owns(self, key: ChunkKey) -> bool:
        """Returns whether the others get this chunk from here."""
        owner = self._owner(key)
        return owner is not None and owner.agent == self.agent

    def finishes(self, name: str) -> bool:
        """Returns whether preprocessors finish the samples of a data set on this node."""
        return self.spec.dataset(name).finish is None

    def source(self, key: ChunkKey) -> Peer | None:
        """Returns whom to ask for a chunk; None if it is to be made here."""
        return self._other(self._owner(key))

    def fetch(self, key: ChunkKey, chunk_size: int) -> memoryview | None:
        """Returns the bytes of a chunk from its owner; None if it is to be made here."""
        peer, question = self.source(key), AskForChunk(key, chunk_size, self.finishes(key.name))
        return self._ask(peer, question)[1]

    def chunk_size(self, name: str) -> int | None:
        """Returns how many samples make a chunk where that was decided; None if that is here.

        Who joined later asks who joined earlier, so nobody waits in a circle.
        """
        first = next(iter(self.board.plan().peers), None)
        return self._ask(self._other(first), name)[0].chunk_size

    def _owner(self, key: ChunkKey) -> Peer | None:
        plan, known = self.board.plan(), self._owners[1]
        if plan is not self._owners[0] or len(known) > _MOST_KNOWN:
            known = {}
            self._owners = plan, known
        if key not in known:
            known[key] = plan.owner(key)
        return known[key]

    def _other(self, peer: Peer | None) -> Peer | None:
        if peer is None or peer.agent == self.agent or self.board.is_left_out(peer):
            return None
        return peer

    def _ask(
        self, peer: Peer | None, question: str | AskForChunk
    ) -> tuple[Answer, memoryview | None]:
        if peer is None:
            return Answer(), None
        deadline = time.monotonic() + self._patience_s
        try:
            channel = self._channel(peer)
            channel.send(question)
            _wait(channel, deadline)
            answer: Answer = channel.receive()
            if not answer.follows:
                return answer, None
            _wait(channel, deadline)
            return answer, channel.receive_bytes()
        except (EOFError, OSError, ProtocolError):
            self.board.leave_out(peer)
            if peer in self._channels:
                self._channels.pop(peer).close()
            return Answer(), None

    def _channel(self, peer: Peer) -> Channel:
        for gone in self._channels.keys() - set(self.board.plan().peers):
            self._channels.pop(gone).close()
        if peer not in self._channels:
            address = ((peer.host, peer.port),)
            self._channels[peer] = connect(
                Invitation(addresses=address, secret=self.secret, fingerprint=peer.fingerprint)
            )
        return self._channels[peer]


def _wait(channel: Channel, deadline: float) -> None:
    """Waits for a message.

    Raises:
        TimeoutError: It does not come in time.
    """
    arriving = select.poll()
    arriving.register(channel, select.POLLIN)
    while not channel.has_message():
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not arriving.poll(1e3 * left_s):
            raise TimeoutError
