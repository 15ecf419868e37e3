"""The process that gives a node's own chunks to the others: to the broker it is a reader.

A chunk that this node does not own is refused, also when that comes to be so while it is being
made: an owner waits for nobody, so nobody waits in a circle.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
from itertools import islice

from optuna_fleet.exceptions import FleetError, PreprocessingError
from optuna_fleet.pipeline import wire
from optuna_fleet.pipeline.exchange import PATIENCE_S, AskForChunk, Peers, Plan
from optuna_fleet.pipeline.reader.batches import OpenedPass
from optuna_fleet.pipeline.reader.client import PipelineClient
from optuna_fleet.pipeline.spec import ChunkKey, count_chunks
from optuna_fleet.wire.channel import Channel


class Giver:
    """Answers other nodes, each of whose processes asks for one chunk at a time.

    ``reader`` is the end of a socket pair whose other end the ``PipelineServer`` has. ``news``
    brings new plans; at its end this process is to end. Beyond each chunk that is asked for,
    ``look_ahead`` own ones are made: so all nodes preprocess at a time, also while all wait for
    the same chunk.
    """

    def __init__(
        self, peers: Peers, reader: socket.socket, news: socket.socket, *, look_ahead: int
    ) -> None:
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
