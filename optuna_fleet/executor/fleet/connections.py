"""The driver's end of all control channels: who is connected, what they say."""

from __future__ import annotations

import contextlib
import math
import resource
import select
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from optuna_fleet.exceptions import LaunchError
from optuna_fleet.executor.fleet.addresses import own_addresses
from optuna_fleet.executor.fleet.inbox import Inbox
from optuna_fleet.executor.fleet.listener import Listener
from optuna_fleet.wire.channel import Channel
from optuna_fleet.wire.credentials import make_credentials
from optuna_fleet.wire.invitation import Invitation
from optuna_fleet.wire.messages import TrainerReady, TrainerUnfit
from optuna_fleet.wire.node_messages import (
    SIGN_EVERY_S,
    AgentJoining,
    ConnectionEnded,
    ProcessId,
    SignOfLife,
    TrainerExited,
    TrainerStarted,
)
from optuna_fleet.wire.transfer import OpenTransfer

_ALL = ("", "*", "0.0.0.0", "::")
_MOST_DESCRIPTORS = 65_536
_MOST_WAITING, _FEW_WAITING = 16, 4
"""So many messages of a trainer may wait to be taken: no more are read until few are left. Those
of others are not far behind then, and a trainer that says too much waits itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSilent:
    """Nothing was heard of an agent for as long as its lease."""

    agent: str


@dataclass(slots=True, eq=False)
class _Peer:
    """One connection.

    Attributes:
        go_on: Has more of a trainer be read.
        agent: Of which agent it is, or its trainer; "" until it has said so.
        is_agent: Of the agent itself.
        heard: When the agent last gave a sign of life; infinite until it is up.
        num_read: Messages of a trainer, and how many of them were taken. Each has one writer.
    """

    channel: Channel
    go_on: Callable[[_Peer], None]
    number: int = field(init=False)
    agent: str = ""
    is_agent: bool = False
    heard: float = math.inf
    num_read: int = 0
    num_taken: int = 0
    is_paused: bool = False

    def __post_init__(self) -> None:
        self.number = self.channel.fileno()

    def taken(self) -> None:
        """A message was; on the caller's thread."""
        self.num_taken += 1
        if self.is_paused and self.num_read - self.num_taken <= _FEW_WAITING:
            self.go_on(self)


class Connections:
    """Accepts the agents and trainers of one executor; what they say is put into the inbox.

    Its thread never waits for one of them: not for the rest of a message, nor until one takes a
    message. What has the time in it is said in order: what a trainer has said comes before the
    news of its death, and all that a node has said before the news of its loss.

    Args:
        host: Address to listen on; None for all.
        port: To listen on; 0 for any that is free.

    Attributes:
        inbox: Where all that happens is put.
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
        self.on_transfer: Callable[[Channel], None] = Channel.close
        self._peers: dict[Channel, _Peer] = {}
        self._lease_s = math.inf
        self._read_now: list[tuple[Any, Callable[[], None] | None]] = []
        self.inbox = Inbox()
        self._listener = Listener(
            host,
            credentials,
            self._welcome,
            self._tell,
            on_turn=self._hand_over,
            on_failure=self._failed,
            port=port,
        )
        self.inbox.sockets = self._listener
        self.host, self.port = self._listener.host, self._listener.port
        hosts = own_addresses() if host is None else (host,)
        self.invitation = Invitation(
            addresses=tuple((one, self.port) for one in hosts), credentials=credentials
        )

    # -- what the caller's thread does ------------------------------------------------------------

    def send(self, channel: Channel | None, message: Any) -> None:
        """Send a message; a peer that is gone is found out by its end of stream."""
        if channel is None:
            return
        with contextlib.suppress(OSError):
            channel.post(message)
            if channel.has_unsent:
                self._listener.call(self._watch, channel)

    def has_ended(self, agent: str) -> bool:
        """Whether an agent is gone, though what it has said may not all have been read."""
        channel = self.agents.get(agent)
        return channel is None or channel.has_hung_up

    def last_heard(self, agent: str) -> float:
        """When an agent last gave a sign of life; infinite if it is not up, or not there."""
        peer = self._peers.get(self.agents.get(agent))  # type: ignore[arg-type]
        return math.inf if peer is None else peer.heard

    def cut(self, agent: str) -> None:
        """End the connection of an agent, whose end is read like any other."""
        if (channel := self.agents.get(agent)) is not None:
            channel.cut()

    def give_up(self, agent: str, *events: Any) -> None:
        """Hear nothing more of an agent and its trainers.

        These events are put behind all that they have said.
        """
        self._listener.call(self._give_up, agent, events)

    def keep_leases(self, lease_s: float) -> None:
        """Begin to give signs of life to agents, and to tell which give none for so long."""
        self._lease_s = lease_s
        self._listener.call(self._give_signs)

    def close(self) -> None:
        """Close every channel and stop accepting."""
        self._listener.close()
        self.inbox.close()
        for channel in self._peers:
            channel.close()

    # -- on the thread of the sockets -------------------------------------------------------------

    def _tell(self, event: Any) -> None:
        self._read_now.append((event, None))

    def _hand_over(self) -> None:
        if self._read_now:
            read, self._read_now = self._read_now, []
            self.inbox.put_all(read)

    def _failed(self, error: Exception) -> None:
        text = f"The driver can't hear of its nodes any more: {type(error).__name__}: {error}"
        self.inbox.put(LaunchError(text))

    def _welcome(self, channel: Channel) -> None:
        self._peers[channel] = _Peer(channel, partial(self._listener.call, self._go_on))
        self._watch(channel)

    def _watch(self, channel: Channel) -> None:
        """Wait until a peer says more, unless it has said enough, and until it takes more."""
        if (peer := self._peers.get(channel)) is None:
            return
        reads = 0 if peer.is_paused else select.EPOLLIN
        if events := reads | (select.EPOLLOUT if channel.has_unsent else 0):
            self._listener.watch(peer.number, events, partial(self._attend, peer))
        else:  # or its end would be told without end
            self._listener.unwatch(peer.number)

    def _attend(self, peer: _Peer, events: int) -> None:
        if peer.channel.has_unsent:
            with contextlib.suppress(OSError):
                peer.channel.flush()
            self._watch(peer.channel)
        if events & ~select.EPOLLOUT and not peer.is_paused:
            self._read(peer, is_all=peer.is_agent)

    def _read(self, peer: _Peer, *, is_all: bool) -> None:
        """Read what a peer has said, if it is there as a whole, or all of it."""
        channel = peer.channel
        while channel.has_message():
            try:
                message = channel.receive()
            except (EOFError, OSError) as error:
                if isinstance(error, ConnectionAbortedError):
                    self._tell(str(error))
                self._drop(peer)
                return
            self._hear(peer, message)
            if not is_all or channel not in self._peers:
                return

    def _hear(self, peer: _Peer, message: Any) -> None:
        match message:
            case SignOfLife():
                peer.heard = time.monotonic()
                return
            case OpenTransfer():
                self._forget(peer)
                self.on_transfer(peer.channel)
                return
            case AgentJoining():
                self.agents[message.agent] = peer.channel
                peer.agent, peer.is_agent = message.agent, True
            case TrainerReady() | TrainerUnfit():
                self.trainers[message.process] = peer.channel
                peer.agent = message.process.agent
            case TrainerStarted():
                peer.heard = time.monotonic()  # from now on silence is none of a start
            case TrainerExited() if channel := self.trainers.get(message.process):
                self._read(self._peers[channel], is_all=True)
        if peer.is_agent:
            self._tell(message)
        else:
            peer.num_read += 1
            self._read_now.append((message, peer.taken))
            if peer.num_read - peer.num_taken >= _MOST_WAITING and not peer.is_paused:
                peer.is_paused = True
                self._watch(peer.channel)
                self._go_on(peer)  # they may have been taken meanwhile

    def _go_on(self, peer: _Peer) -> None:
        if peer.is_paused and peer.num_read - peer.num_taken <= _FEW_WAITING:
            peer.is_paused = False
            self._watch(peer.channel)

    def _drop(self, peer: _Peer) -> None:
        self._forget(peer)
        peer.channel.close()
        if peer.is_agent and self.agents.get(peer.agent) is peer.channel:
            del self.agents[peer.agent]
            self._tell(ConnectionEnded(agent=peer.agent))
        for process in [p for p, c in self.trainers.items() if c is peer.channel]:
            del self.trainers[process]

    def _forget(self, peer: _Peer) -> None:
        self._listener.unwatch(peer.number)
        self._peers.pop(peer.channel, None)

    def _give_up(self, agent: str, events: Iterable[Any]) -> None:
        for peer in [peer for peer in self._peers.values() if peer.agent == agent]:
            self._read(peer, is_all=True)
            if peer.channel in self._peers:
                self._drop(peer)
        for event in events:
            self._tell(event)

    def _give_signs(self) -> None:
        for agent, channel in self.agents.items():
            with contextlib.suppress(OSError):
                # What waits to be sent is a sign itself, once the agent takes it.
                channel.flush() if channel.has_unsent else channel.post(SignOfLife())
            if channel.has_unsent:
                self._watch(channel)
            peer = self._peers[channel]
            if peer.heard <= self._listener.now - self._lease_s:
                peer.heard = math.inf
                self._tell(AgentSilent(agent=agent))
        self._listener.later(SIGN_EVERY_S, self._give_signs)


def _allow_descriptors() -> None:
    """Each trainer and agent takes one: the usual limit of 1024 is too low for a large fleet."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
