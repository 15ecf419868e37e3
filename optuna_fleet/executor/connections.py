"""The driver's end of all control channels: who is connected, what they say."""

from __future__ import annotations

import contextlib
import math
import queue
import secrets
import select
import selectors
import socket
from collections.abc import Iterator
from typing import Any, Protocol

from optuna_fleet.executor.listener import Listener
from optuna_fleet.sampler_bridge.compat import fleet_logger
from optuna_fleet.wire.channel import Channel
from optuna_fleet.wire.messages import AgentReady, TrainerExited, TrainerReady


class Readable(Protocol):
    """Something a selector can wait for."""

    def fileno(self) -> int:
        """Its file descriptor."""
        ...


class Connections:
    """Accepts the agents and trainers of one executor and hands over their messages in order.

    It never waits for one of them: not for the rest of a message, nor until one takes a message.

    Attributes:
        secret: What agents and trainers must know.
        agents: Channels by node.
        trainers: Channels by process id: a device's next trainer is another one.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.secret = secrets.token_bytes(32)
        self.trainers: dict[int, Channel] = {}
        self.agents: dict[int, Channel] = {}
        self._news: queue.SimpleQueue[Channel | str] = queue.SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._listener = Listener(host, self.secret, self._note, self._note)
        self.host, self.port = self._listener.host, self._listener.port

    def _note(self, news: Channel | str) -> None:  # on the listener's thread
        self._news.put(news)
        with contextlib.suppress(BlockingIOError):  # then it wakes anyway
            self._waker.send(b"\0")

    def messages(self, timeout_s: float | None, *others: Readable) -> Iterator[Any]:
        """Yield messages, waiting at most `timeout_s`; stop early if one of `others` is ready."""
        waiting = select.poll()  # for this time only: a Ctrl-C leaves nothing half registered
        for one in (self._selector, *others):
            waiting.register(one, select.POLLIN)
        waiting.poll(None if timeout_s is None else math.ceil(1e3 * max(0.0, timeout_s)))
        for key, mask in self._selector.select(0):
            if key.fileobj is self._wake:
                self._hear_news()
            elif isinstance(key.data, Channel) and not key.data.is_closed:
                if mask & selectors.EVENT_WRITE:
                    self._flush(key.data)
                if mask & selectors.EVENT_READ:
                    yield from self._receive(key.data)

    def _hear_news(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(4096)
        while not self._news.empty():
            match self._news.get():
                case str() as text:
                    fleet_logger.warning(text)
                case channel:
                    self._selector.register(channel, selectors.EVENT_READ, channel)

    def _receive(self, channel: Channel) -> Iterator[Any]:
        if not channel.has_message():
            return
        try:
            message = channel.receive()
        except (EOFError, OSError) as error:
            if isinstance(error, ConnectionAbortedError):
                fleet_logger.warning(str(error))
            self._drop(channel)
            return
        match message:
            case AgentReady():
                self.agents[message.node] = channel
            case TrainerReady():
                self.trainers[message.pid] = channel
            case TrainerExited():
                yield from self.last_words(message.pid)
        yield message

    def last_words(self, pid: int) -> Iterator[Any]:
        """Yield what a trainer said before it died: that comes before the news of its death."""
        channel = self.trainers.get(pid)
        while channel is not None and not channel.is_closed and channel.has_message():
            yield from self._receive(channel)

    def _drop(self, channel: Channel) -> None:
        self._selector.unregister(channel)
        channel.close()
        self.trainers = {pid: c for pid, c in self.trainers.items() if c is not channel}
        self.agents = {node: c for node, c in self.agents.items() if c is not channel}

    def send(self, channel: Channel | None, message: Any) -> None:
        """Send a message; a peer that is gone is found out by its end of stream."""
        if channel is None:
            return
        with contextlib.suppress(OSError):
            channel.post(message)
            if channel.has_unsent:
                both = selectors.EVENT_READ | selectors.EVENT_WRITE
                self._selector.modify(channel, both, channel)

    def _flush(self, channel: Channel) -> None:
        with contextlib.suppress(OSError):
            channel.flush()
        if not channel.has_unsent:
            self._selector.modify(channel, selectors.EVENT_READ, channel)

    def close(self) -> None:
        """Close every channel and stop accepting."""
        self._listener.close()
        self._hear_news()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, Channel):
                key.data.close()
        self._selector.close()
        self._wake.close()
        self._waker.close()
