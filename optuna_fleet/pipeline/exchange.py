"""Chunks shared between nodes: each comes from the node that owns it, or is made here.

Who owns which is the scheme of Pittman et al. (SC18, IV):

| scheme | the owner of a chunk is |
|---|---|
| local | each node, for itself |
| all-shared | one of all nodes, by a hash of (chunk, node) |
| single-broadcast, multi-broadcast | one of the makers, likewise by a hash |

The hash is a rendezvous hash: when a node comes or goes, only its own chunks change hands. In
single-broadcast the last of the makers gets the chunks of the others, and gives all of them to the
nodes that make none.
"""

from __future__ import annotations

import contextlib
import re
import select
import selectors
import socket
import time
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from optuna_fleet.arguments import check_choice, check_that
from optuna_fleet.exceptions import FleetError, PreprocessingError, ProtocolError
from optuna_fleet.pipeline import wire
from optuna_fleet.pipeline.spec import ChunkKey, PipelineSpec, count_chunks
from optuna_fleet.wire.channel import Channel, connect
from optuna_fleet.wire.invitation import Invitation

if TYPE_CHECKING:
    from optuna_fleet.pipeline.reader.client import OpenedPass

Scheme = Literal["local", "all-shared", "single-broadcast", "multi-broadcast"]
SCHEMES: tuple[Scheme, ...] = ("local", "all-shared", "single-broadcast", "multi-broadcast")

_MANY = re.compile(r"(single|multi)-broadcast:(0*[1-9]\d{0,5})")
"""With its number of makers, p."""

MOST_PEERS = 500
"""Of a plan, which has to fit into one packet: nodes that join later only ask the others."""

PATIENCE_S = 10.0
"""A peer that has not answered by then is done without."""

LEFT_OUT_S = 60.0
"""For so long, unless there is a new plan before."""

_MOST_KNOWN = 10_000  # owners, which take a hash per node to find


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Where the chunks of a node are to be had.

    Attributes:
        agent: The incarnation of the node's agent.
        host: Address to connect to.
        port: Likewise.
    """

    agent: str
    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The nodes that share chunks, and how. The driver sends a new one when either changes.

    Attributes:
        scheme: How.
        peers: All of them, in the order in which they joined.
        makers: Those that preprocess for all (their agents), in the broadcasts; the first node if
            there are none.
    """

    scheme: Scheme = "local"
    peers: tuple[Peer, ...] = ()
    makers: frozenset[str] = frozenset()

    @property
    def is_shared(self) -> bool:
        """Whether there is anybody to get chunks from."""
        return self.scheme != "local" and len(self.peers) > 1

    def owner(self, key: ChunkKey) -> Peer | None:
        """Returns whose chunk this is; None if each node makes it for itself."""
        if not self.is_shared:
            return None
        among = self.peers if self.scheme == "all-shared" else self._makers
        return max(among, key=lambda peer: _score(key, peer))

    @property
    def broadcaster(self) -> Peer | None:
        """Who gives all chunks to the nodes that make none; None if owners do."""
        return self._makers[-1] if self.is_shared and self.scheme == "single-broadcast" else None

    @property
    def _makers(self) -> tuple[Peer, ...]:
        return tuple(peer for peer in self.peers if peer.agent in self.makers) or self.peers[:1]


def _score(key: ChunkKey, peer: Peer) -> bytes:
    return blake2b(f"{peer.agent} {key.epoch} {key.chunk} {key.name}".encode()).digest()


def scheme_of(exchange: Any) -> tuple[Scheme, int | None]:
    """Returns what was given: a scheme, and how many nodes make chunks where ":p" says so."""
    if isinstance(exchange, str) and ":" in exchange:
        wanted = 'give a number of makers so: "multi-broadcast:4"'
        check_that("exchange", exchange, _MANY.fullmatch, wanted)
        scheme, _, count = exchange.partition(":")
        return cast("Scheme", scheme), int(count)
    check_choice("exchange", exchange, SCHEMES)
    return cast("Scheme", exchange), None


# Asking others


class AskForChunk(NamedTuple):
    """Asks a chunk's owner for it; its bytes must be what they would be here.

    Answered by whether they follow.
    """

    key: ChunkKey
    chunk_size: int
    is_finished: bool


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
        self._owner_of = lru_cache(_MOST_KNOWN)(plan.owner)
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

    def leave_out(self, peer: Peer) -> None:
        """Nobody here asks this peer for a while."""
        self._left_out_until[peer] = time.monotonic() + LEFT_OUT_S

    def _owner(self, key: ChunkKey) -> Peer | None:
        if self.spec.dataset(key.name).shards:
            key = ChunkKey(key.name, 0, 0)  # a stream is read by one for all
        return self._owner_of(key)

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

    def ask(self, peer: Peer, question: AskForChunk) -> tuple[bool, memoryview | None]:
        """Returns whether a peer has answered (or is gone or slow), and the bytes of a chunk."""
        deadline = time.monotonic() + self._patience_s
        try:
            channel = self._channel(peer)
            channel.send(question)
            if not channel.receive(deadline - time.monotonic()):
                return True, None
            return True, channel.receive_bytes(deadline - time.monotonic())
        except (EOFError, OSError, ProtocolError):
            if peer in self._channels:
                self._channels.pop(peer).close()
            return False, None

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


# Giving to others: in a process of its own, so that the agent waits for nobody


class Giver:
    """Gives a node's own chunks to the others, each of whose processes asks for one at a time.

    A chunk that this node does not own is refused, also when that comes to be so while it is being
    made: an owner waits for nobody, so nobody waits in a circle. To the server it is a reader.

    ``reader`` is the end of a socket pair whose other end the ``PipelineServer`` has. ``news``
    brings new plans; at its end this process is to end. Beyond each chunk that is asked for,
    ``look_ahead`` own ones are made: so all nodes preprocess at a time, also while all wait for
    the same chunk.
    """

    def __init__(
        self, peers: Peers, reader: socket.socket, news: socket.socket, *, look_ahead: int
    ) -> None:
        from optuna_fleet.pipeline.reader.client import PipelineClient  # imports torch

        self._peers = peers
        self._client = PipelineClient(reader, peers.spec)
        self._news = news
        self._look_ahead = look_ahead
        self._asked: dict[Channel, tuple[OpenedPass, ChunkKey]] = {}  # a pass for each chunk
        self._ahead: dict[OpenedPass, ChunkKey] = {}
        self._ahead_to: dict[tuple[str, int], int] = {}
        self._selector = selectors.EpollSelector()  # may be registered with by another thread

    def welcome(self, channel: Channel) -> None:
        """Serves a peer that has proved itself; may be called by another thread."""
        with socket.socket(fileno=socket.dup(channel.fileno())) as sock:
            limit_ms = int(1e3 * PATIENCE_S)  # for one that takes nothing of what is sent to it
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)
        self._selector.register(channel, selectors.EVENT_READ, channel)

    def serve(self) -> None:
        """Answers until the agent is gone."""
        self._selector.register(self._news, selectors.EVENT_READ)
        self._selector.register(self._client, selectors.EVENT_READ)
        with contextlib.suppress(FleetError, EOFError):  # the broker, the agent are gone
            while True:
                for key, mask in self._selector.select():
                    if isinstance(key.data, Channel):
                        self._attend(key.data, mask)
                    elif key.fileobj is self._client:
                        pass  # `_give` hears it
                    else:
                        plan = wire.receive(self._news)
                        assert isinstance(plan, Plan)
                        self._peers.follow(plan)
                        self._refuse_others()
                self._give()

    def _attend(self, channel: Channel, mask: int) -> None:
        try:
            if mask & selectors.EVENT_WRITE:
                channel.flush()
                self._watch(channel)
            elif channel.has_message():
                self._hear(channel, channel.receive())
        except (EOFError, OSError):
            self._selector.unregister(channel)
            channel.close()
            self._end_pass(channel)

    def _hear(self, channel: Channel, question: AskForChunk) -> None:
        key = question.key
        opened = self._open(key)
        is_finished = self._peers.spec.dataset(key.name).finish is None
        if (opened.chunk_size, is_finished) != (question.chunk_size, question.is_finished):
            opened.close()
            channel.post(False)
            return
        self._asked[channel] = opened, key
        opened.advance(self._beyond(key), needed=[key.chunk])
        self._refuse_others()
        for chunk in self._next_own(key, opened.chunk_size):
            ahead = self._open(key)
            self._ahead[ahead] = key._replace(chunk=chunk)
            ahead.advance(self._beyond(key), ahead=[chunk])

    def _refuse_others(self) -> None:
        for channel, (_, key) in list(self._asked.items()):
            if not self._peers.owns(key) and not channel.has_unsent:
                self._answer(channel, None)

    def _next_own(self, key: ChunkKey, size: int) -> list[int]:
        """The next chunks of this node that were not asked for yet."""
        num_samples = self._peers.spec.dataset(key.name).num_samples
        after = range(key.chunk + 1, count_chunks(num_samples, size))
        own = (chunk for chunk in after if self._peers.owns(key._replace(chunk=chunk)))
        last = self._ahead_to.get(key[:2], -1)
        found = [chunk for chunk in islice(own, self._look_ahead) if chunk > last]
        self._ahead_to[key[:2]] = max([last, *found])
        return found

    def _give(self) -> None:
        """Sends what the broker has lent."""
        # All at once: what came in while one is looked at would be news of another, seen already.
        self._client.hear()
        for opened, key in list(self._ahead.items()):
            if opened.has(key.chunk):
                del self._ahead[opened]
                opened.close()  # there it is, until it is asked for
        for channel, (opened, key) in list(self._asked.items()):
            if not channel.has_unsent and opened.has(key.chunk):
                data = None  # if it can't be made, who asked for it will see why
                with contextlib.suppress(PreprocessingError):
                    data = opened.take(key.chunk).memory
                self._answer(channel, data)

    def _answer(self, channel: Channel, data: memoryview | None) -> None:
        with contextlib.suppress(OSError):  # its end will be read
            channel.post(data is not None)
            if data is not None:
                channel.post_bytes(data)
        data = None  # or the chunk would be copied when it is given back
        self._watch(channel)

    def _watch(self, channel: Channel) -> None:
        """Waits until a peer takes more; a chunk is held until it has been sent."""
        wanted = selectors.EVENT_WRITE if channel.has_unsent else selectors.EVENT_READ
        self._selector.modify(channel, wanted, channel)
        if not channel.has_unsent:
            self._end_pass(channel)

    def _end_pass(self, channel: Channel) -> None:
        if channel in self._asked:
            self._asked.pop(channel)[0].close()

    def _open(self, key: ChunkKey) -> OpenedPass:
        return self._client.open_pass(key.name, key.epoch, self._beyond(key))

    def _beyond(self, key: ChunkKey) -> int:
        """A place behind the last chunk: the broker makes none on account of a pass there."""
        return 2 * self._peers.spec.dataset(key.name).num_samples
