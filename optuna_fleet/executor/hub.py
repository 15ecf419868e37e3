"""The driver's end of all control channels: who is connected, what they say."""

from __future__ import annotations

import contextlib
import queue
import secrets
import selectors
import socket
import threading
from collections.abc import Iterator
from typing import Any, Protocol

from optuna_fleet.channel import Channel, Listener
from optuna_fleet.messages import AgentReady, TrainerExited, TrainerReady


class Readable(Protocol):
    """Something a selector can wait for."""

    def fileno(self) -> int:
        """Its file descriptor."""
        ...


class Hub:
    """Accepts the agents and trainers of one executor and hands over their messages in order.

    Attributes:
        secret: What agents and trainers must know.
        agents: Channels by node.
        trainers: Channels by process id: a device's next trainer is another one.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.secret = secrets.token_bytes(32)
        self.trainers: dict[int, Channel] = {}
        self.agents: dict[int, Channel] = {}
        self._closing = threading.Lock()
        self._is_closed = False
        self._newcomers: queue.SimpleQueue[Channel] = queue.SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._listener = Listener(host, self.secret, self._welcome)
        self.host, self.port = self._listener.host, self._listener.port

    def _welcome(self, channel: Channel) -> None:  # on the listener's thread
        with self._closing:
            if self._is_closed:
                channel.close()
                return
            self._newcomers.put(channel)
            self._waker.send(b"\0")

    def messages(self, timeout_s: float | None, *others: Readable) -> Iterator[Any]:
        """Yield messages, waiting at most `timeout_s`; stop early if one of `others` is ready."""
        for other in others:
            self._selector.register(other, selectors.EVENT_READ, other)
        try:
            ready = self._selector.select(timeout_s)
        finally:
            for other in others:
                self._selector.unregister(other)
        for key, _ in ready:
            if key.fileobj is self._wake:
                self._admit()
            elif isinstance(key.data, Channel) and not key.data.is_closed:
                yield from self._receive(key.data)

    def _admit(self) -> None:
        for _ in self._wake.recv(4096):
            channel = self._newcomers.get()
            self._selector.register(channel, selectors.EVENT_READ, channel)

    def _receive(self, channel: Channel) -> Iterator[Any]:
        try:
            message = channel.receive()
        except (EOFError, OSError):
            self._drop(channel)
            return
        match message:
            case AgentReady():
                self.agents[message.node] = channel
            case TrainerReady():
                self.trainers[message.pid] = channel
            case TrainerExited() if message.pid in self.trainers:
                # What it still said before it died comes first.
                yield from self._drain(self.trainers[message.pid])
        yield message

    def _drain(self, channel: Channel) -> Iterator[Any]:
        while not channel.is_closed and channel.has_message():
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
            channel.send(message)

    def close(self) -> None:
        """Close every channel and stop accepting."""
        with self._closing:
            self._is_closed = True
        self._listener.close()
        while not self._newcomers.empty():
            self._newcomers.get().close()
        for channel in [*self.trainers.values(), *self.agents.values()]:
            channel.close()
        self._selector.close()
        self._wake.close()
        self._waker.close()
