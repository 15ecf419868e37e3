"""The other nodes: whose chunk is whose, and a process' way to ask for one, for a bounded time."""

from __future__ import annotations

import select
import time
from typing import NamedTuple

from optuna_fleet.exceptions import ProtocolError
from optuna_fleet.pipeline.exchange.owners import Peer, Plan
from optuna_fleet.pipeline.spec import ChunkKey, PipelineSpec
from optuna_fleet.wire.channel import Channel, connect
from optuna_fleet.wire.invitation import Invitation

PATIENCE_S = 10.0
"""A peer that has not answered by then is done without."""

LEFT_OUT_S = 60.0
"""For so long, unless there is a new plan before."""

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
    """The other nodes, as an agent and the process that gives its chunks see them.

    ``agent`` is the incarnation of this node's agent, ``credentials`` the sweep's; ``plan`` says
    how they share chunks at present.
    """

    def __init__(
        self, agent: str, credentials: bytes, spec: PipelineSpec, patience_s: float = PATIENCE_S
    ) -> None:
        self.spec = spec
        self.agent = agent
        self.credentials = credentials
        self.patience_s = patience_s
        self.follow(Plan())

    def follow(self, plan: Plan) -> None:
        """Puts a plan in the place of the last; nobody is left out any more."""
        self.plan = plan
        self._broadcaster = plan.broadcaster
        self._owners: dict[ChunkKey, Peer | None] = {}
        self._left_out_until: dict[Peer, float] = {}

    def owns(self, key: ChunkKey) -> bool:
        """Returns whether the others get this chunk from here."""
        givers = (self._owner(key), self._broadcaster)
        return any(giver is not None and giver.agent == self.agent for giver in givers)

    def source(self, key: ChunkKey) -> Peer | None:
        """Returns whom to ask for a chunk; None if it is to be made here."""
        if self._broadcaster is not None and self.agent not in self.plan.makers:
            return self._other(self._broadcaster)
        return self._other(self._owner(key))

    def decider(self) -> Peer | None:
        """Returns who says how many samples make a chunk; None if that is decided here.

        Who joined later asks who joined earlier, so nobody waits in a circle.
        """
        return self._other(next(iter(self.plan.peers), None))

    def leave_out(self, peer: Peer) -> None:
        """Nobody here asks this peer for a while."""
        self._left_out_until[peer] = time.monotonic() + LEFT_OUT_S

    def _owner(self, key: ChunkKey) -> Peer | None:
        if self.spec.dataset(key.name).shards:
            key = ChunkKey(key.name, 0, 0)  # a stream is read by one for all
        if len(self._owners) > _MOST_KNOWN:
            self._owners.clear()
        if key not in self._owners:
            self._owners[key] = self.plan.owner(key)
        return self._owners[key]

    def _other(self, peer: Peer | None) -> Peer | None:
        if peer is None or peer.agent == self.agent:
            return None
        return None if self._left_out_until.get(peer, 0.0) > time.monotonic() else peer


class Asking:
    """A process' connections to peers, which have the sweep's credentials."""

    def __init__(self, credentials: bytes, patience_s: float) -> None:
        self._credentials = credentials
        self._patience_s = patience_s
        self._channels: dict[Peer, Channel] = {}

    def ask(
        self, peer: Peer, question: str | AskForChunk
    ) -> tuple[Answer | None, memoryview | None]:
        """Returns a peer's answer, None if it is gone or slow, and the bytes of a chunk."""
        deadline = time.monotonic() + self._patience_s
        try:
            channel = self._channel(peer)
            channel.send(question)
            answer: Answer = channel.receive(deadline - time.monotonic())
            if not answer.follows:
                return answer, None
            return answer, channel.receive_bytes(deadline - time.monotonic())
        except (EOFError, OSError, ProtocolError):
            if peer in self._channels:
                self._channels.pop(peer).close()
            return None, None

    def _channel(self, peer: Peer) -> Channel:
        if peer not in self._channels:
            self._close_ended()
            address = ((peer.host, peer.port),)
            self._channels[peer] = connect(
                Invitation(addresses=address, credentials=self._credentials)
            )
        return self._channels[peer]

    def _close_ended(self) -> None:
        """Closes the channels to nodes that have left: nobody speaks unasked but at his end."""
        ended = select.poll()
        peers = {channel.fileno(): peer for peer, channel in self._channels.items()}
        for descriptor in peers:
            ended.register(descriptor, select.POLLIN)
        for descriptor, _ in ended.poll(0):
            self._channels.pop(peers[descriptor]).close()
