"""The driver's end of all control channels: who is connected, what they say."""

from __future__ import annotations

import contextlib
import math
import queue
import resource
import select
import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from optuna_fleet.executor.fleet.addresses import own_addresses
from optuna_fleet.executor.fleet.departures import Readable
from optuna_fleet.executor.fleet.listener import Listener
from optuna_fleet.sampler_bridge.compat import fleet_logger
from optuna_fleet.wire.channel import Channel
from optuna_fleet.wire.credentials import make_credentials
from optuna_fleet.wire.invitation import Invitation
from optuna_fleet.wire.messages import TrainerReady
from optuna_fleet.wire.node_messages import (
    SIGN_EVERY_S,
    AgentJoining,
    ConnectionEnded,
    ProcessId,
    SignOfLife,
    TrainerExited,
)
from optuna_fleet.wire.transfer import OpenTransfer

_ALL = ("", "*", "0.0.0.0", "::")
_MOST_DESCRIPTORS = 65_536


class Connections:
    """Accepts the agents and trainers of one executor and hands over their messages in order.

    It never waits for one of them: not for the rest of a message, nor until one takes a message.

    Args:
        host: Address to listen on; None for all.
        port: To listen on; 0 for any that is free.

    Attributes:
        agents: Channels by incarnation.
        trainers: Channels by process: a device's next trainer is another one.
        on_transfer: Is given the connections that carry checkpoints.
    """

    def __init__(self, host: str | None = "127.0.0.1", port: int = 0) -> None:
        _allow_descriptors()
        host = None if host in _ALL else host
        credentials = make_credentials()
        self.trainers: dict[ProcessId, Channel] = {}
        self.agents: dict[str, Channel] = {}
        self._of_agents: set[Channel] = set()
        self.on_transfer: Callable[[Channel], None] = Channel.close
        self._are_closed = threading.Event()
        self._signs: threading.Thread | None = None
        self._news: queue.SimpleQueue[Channel | str] = queue.SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        try:
            self._listener = Listener(host, credentials, self._note, self._note, port=port)
        except BaseException:
            self._close_own()
            raise
        self.host, self.port = self._listener.host, self._listener.port
        hosts = own_addresses() if host is None else (host,)
        self.invitation = Invitation(
            addresses=tuple((one, self.port) for one in hosts), credentials=credentials
        )

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
        """Yield a message if there is one; of an agent all: its signs of life can't wait."""
        is_first = True
        while (is_first or channel in self._of_agents) and channel.has_message():
            is_first = False
            yield from self._receive_one(channel)

    def _receive_one(self, channel: Channel) -> Iterator[Any]:
        try:
            message = channel.receive()
        except (EOFError, OSError) as error:
            if isinstance(error, ConnectionAbortedError):
                fleet_logger.warning(str(error))
            yield from self._drop(channel)
            return
        match message:
            case OpenTransfer():
                self._selector.unregister(channel)
                self.on_transfer(channel)
                return
            case AgentJoining():
                self.agents[message.agent] = channel
                self._of_agents.add(channel)
            case TrainerReady():
                self.trainers[message.process] = channel
            case TrainerExited():
                yield from self.last_words(message.process)
        yield message

    def last_words(self, of: ProcessId | str) -> Iterator[Any]:
        """Yield what a trainer or agent said before it died: that comes before the news of it."""
        channel = self.agents.get(of) if isinstance(of, str) else self.trainers.get(of)
        while channel is not None and not channel.is_closed and channel.has_message():
            yield from self._receive(channel)

    def _drop(self, channel: Channel) -> Iterator[ConnectionEnded]:
        self._selector.unregister(channel)
        channel.close()
        self._of_agents.discard(channel)
        self.trainers = {process: c for process, c in self.trainers.items() if c is not channel}
        ended = [agent for agent, c in self.agents.items() if c is channel]
        for agent in ended:
            del self.agents[agent]
            yield ConnectionEnded(agent=agent)

    def give_up(self, agent: str) -> None:
        """Close the connections of an agent and its trainers: nothing more is heard of them."""
        trainers = [c for process, c in self.trainers.items() if process.agent == agent]
        for channel in [*trainers, *self._agent_channels(agent)]:
            for _ in self._drop(channel):
                pass

    def has_ended(self, agent: str) -> bool:
        """Whether an agent is gone, though what it has said may not all have been read."""
        hung_up = select.poll()
        for channel in self._agent_channels(agent):
            hung_up.register(channel, select.POLLRDHUP)
        return agent not in self.agents or bool(hung_up.poll(0))

    def cut(self, agent: str) -> None:
        """End the connection of an agent, whose end is read like any other."""
        for channel in self._agent_channels(agent):
            channel.cut()

    def _agent_channels(self, agent: str) -> list[Channel]:
        return [self.agents[agent]] if agent in self.agents else []

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

    def give_signs(self) -> None:
        """Begin to give signs of life to agents, on a thread: samplers may compute for long."""
        name = "optuna-fleet-signs"
        self._signs = threading.Thread(target=self._give_signs, name=name, daemon=True)
        self._signs.start()

    def _give_signs(self) -> None:
        while not self._are_closed.wait(SIGN_EVERY_S):
            for channel in list(self.agents.values()):
                with contextlib.suppress(OSError, ValueError):  # closed meanwhile
                    # What waits to be sent is a sign itself, once the agent takes it.
                    channel.flush() if channel.has_unsent else channel.post(SignOfLife())

    def close(self) -> None:
        """Close every channel and stop accepting."""
        self._are_closed.set()
        if self._signs is not None:
            self._signs.join()
        self._listener.close()
        self._hear_news()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, Channel):
                key.data.close()
        self._close_own()

    def _close_own(self) -> None:
        self._selector.close()
        self._wake.close()
        self._waker.close()


def _allow_descriptors() -> None:
    """Each trainer and agent takes one: the usual limit of 1024 is too low for a large fleet."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
