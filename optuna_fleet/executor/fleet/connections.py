"""The driver's end of all control channels: who is connected, what they say."""

from __future__ import annotations

import contextlib
import math
import resource
import select
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from optuna_fleet.wire.channel import Channel
from optuna_fleet.wire.inbox import Inbox
from optuna_fleet.wire.invitation import Invitation, make_credentials, own_addresses
from optuna_fleet.wire.listener import Listener
from optuna_fleet.wire.messages import Heartbeat, TrainerReady
from optuna_fleet.wire.node_messages import (
    SIGN_EVERY_S,
    AgentJoining,
    ProcessId,
    SignOfLife,
    TrainerExited,
    TrainerStarted,
)
from optuna_fleet.wire.transfer import Get, GetDataSets, Put

_ALL = ("", "*", "0.0.0.0", "::")
_MOST_DESCRIPTORS = 65_536
_MANY = 1000  # messages: more than a trainer says while a driver is busy, if it does not flood it
_CAUSE_LIMIT_S = 0.5  # after the end of a connection, in which the engine may say why


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentUnheard:
    """An agent says nothing more, for a `cause` in words; all is read that it has said.

    If it `has_successor`, another agent wants to join from its node.
    """

    agent: str
    cause: str
    has_successor: bool = False


@dataclass(slots=True, eq=False)
class _Peer:
    """One connection.

    Attributes:
        agent: Of which agent it is, or its trainer; "" until it has said so.
        process: Of which trainer it is.
        heard: When the agent last gave a sign of life; infinite until it is up.
    """

    channel: Channel
    agent: str = ""
    process: ProcessId | None = None
    heard: float = math.inf


class Connections:
    """Accepts the agents and trainers of one executor; what they say is put into the inbox.

    Nobody waits for one of them: not for the rest of a message, nor until one takes a message.
    What a node has said comes in order: a trainer's first word after that it was started, its last
    before the news of its death, and all before the news of the node's loss. What a trainer says
    is read as it is taken, so that one that says too much waits itself; but what is there is read
    before an event that is due.

    Args:
        host: Address to listen on; None for all.
        port: To listen on; 0 for any that is free.

    Attributes:
        inbox: Where all that happens is put; all here is done in its turns but what is public.
        agents: Channels by incarnation.
        trainers: Channels by process: a device's next trainer is another one.
        on_transfer: Is given the connections that carry files, and what is asked for there.
    """

    def __init__(self, host: str | None = "127.0.0.1", port: int = 0) -> None:
        _allow_descriptors()
        host = None if host in _ALL else host
        credentials = make_credentials()
        self.trainers: dict[ProcessId, Channel] = {}
        self.agents: dict[str, Channel] = {}
        self.on_transfer: Callable[[Channel, Any], None] = lambda channel, request: channel.close()
        self._peers: dict[Channel, _Peer] = {}
        self._dead: set[ProcessId] = set()  # of which nothing had come yet
        self._lease_s = math.inf
        self.inbox = Inbox()
        try:
            self._listener = Listener(
                *(self.inbox, host, credentials, self._welcome, self.inbox.put), port=port
            )
        except BaseException:
            self.inbox.close()
            raise
        self.host, self.port = self._listener.host, self._listener.port
        hosts = own_addresses() if host is None else (host,)
        self.invitation = Invitation(
            addresses=tuple((one, self.port) for one in hosts), credentials=credentials
        )

    def send(self, channel: Channel | None, message: Any) -> None:
        """Send a message; a peer that is gone is found out by its end of stream."""
        if channel is None:
            return
        with contextlib.suppress(OSError):
            channel.post(message)
            if channel.has_unsent:
                self.inbox.call_later(0.0, self._watch, channel)

    def has_ended(self, agent: str) -> bool:
        """Whether an agent is gone, though what it has said may not all have been read."""
        channel = self.agents.get(agent)
        return channel is None or channel.has_hung_up

    def cut(self, agent: str) -> None:
        """End the connection of an agent, whose end is read like any other."""
        if (channel := self.agents.get(agent)) is not None:
            channel.cut()

    def give_up(self, agent: str, *events: Any) -> None:
        """Hear nothing more of an agent and its trainers.

        These events are put behind all that they have said.
        """
        self.inbox.call_later(0.0, self._give_up, agent, events)

    def keep_leases(self, lease_s: float) -> None:
        """Begin to give signs of life to agents, and to tell which give none for so long."""
        self._lease_s = lease_s
        self.inbox.call_later(0.0, self._give_signs)

    def close(self) -> None:
        """Close every channel and stop accepting."""
        self.inbox.close()
        self._listener.close()
        for channel in self._peers:
            channel.close()

    # -- in a turn --------------------------------------------------------------------------------

    def _welcome(self, channel: Channel) -> None:
        self._peers[channel] = _Peer(channel)
        self._watch(channel)

    def _watch(self, channel: Channel) -> None:
        """Wait until a peer says more, and until it takes more if something is left."""
        if (peer := self._peers.get(channel)) is not None:
            events = select.EPOLLIN | (select.EPOLLOUT if channel.has_unsent else 0)
            self.inbox.watch(channel.fileno(), events, partial(self._attend, peer))

    def _attend(self, peer: _Peer, events: int) -> None:
        if events & select.EPOLLOUT or peer.channel.has_unsent:
            with contextlib.suppress(OSError):
                peer.channel.flush()
            self._watch(peer.channel)  # also if somebody else has sent the rest
        if events & ~select.EPOLLOUT and (self.inbox.is_taken or peer.process is None):
            most = math.inf if peer.process is None else _MANY if self.inbox.has_due else 1
            self._read(peer, most)

    def _read(self, peer: _Peer | None, most: float = math.inf) -> None:
        """Read so many messages of a peer, as far as they are there as a whole."""
        while peer is not None and peer.channel in self._peers and peer.channel.has_message():
            try:
                message = peer.channel.receive()
            except (EOFError, OSError) as error:
                if isinstance(error, ConnectionAbortedError):
                    self.inbox.put(str(error))
                self._drop(peer)
                return
            self._hear(peer, message)
            if (most := most - 1) <= 0:
                return

    def _hear(self, peer: _Peer, message: Any) -> None:
        match message:
            case SignOfLife():
                peer.heard = time.monotonic()
                return
            case Heartbeat():
                self.inbox.put_at_leisure(message)
                return
            case Put() | Get() | GetDataSets():
                self._forget(peer)
                self.on_transfer(peer.channel, message)
                return
            case AgentJoining():
                self.agents[message.agent] = peer.channel
                peer.agent = message.agent
            case TrainerReady(process=process):
                self._read(self._at(self.agents.get(process.agent)))
                if process in self._dead:
                    self._drop(peer)
                    return
                self.trainers[process] = peer.channel
                peer.agent, peer.process = process.agent, process
            case TrainerStarted(process=process):
                peer.heard = time.monotonic()  # from now on silence is none of a start
                self._dead.discard(process)  # whose number is used again
            case TrainerExited(process=process):
                if (channel := self.trainers.get(process)) is None:
                    self._dead.add(process)
                self._read(self._at(channel))
        self.inbox.put(message)

    def _at(self, channel: Channel | None) -> _Peer | None:
        return None if channel is None else self._peers.get(channel)

    def _drop(self, peer: _Peer) -> None:
        self._forget(peer)
        peer.channel.close()
        if peer.process is not None:
            self.trainers.pop(peer.process, None)
        elif self.agents.get(peer.agent) is peer.channel:
            del self.agents[peer.agent]
            self._dead = {process for process in self._dead if process.agent != peer.agent}
            ended = AgentUnheard(agent=peer.agent, cause="its connection ended")
            self.inbox.call_later(_CAUSE_LIMIT_S, self._unheard, ended)

    def _forget(self, peer: _Peer) -> None:
        self.inbox.unwatch(peer.channel.fileno())
        self._peers.pop(peer.channel, None)

    def _give_up(self, agent: str, events: Iterable[Any]) -> None:
        for peer in [peer for peer in self._peers.values() if peer.agent == agent]:
            self._read(peer)
            if peer.channel in self._peers:
                self._drop(peer)
        for event in events:
            self.inbox.put(event)

    def _give_signs(self) -> None:
        for agent, channel in list(self.agents.items()):
            with contextlib.suppress(OSError):
                # What waits to be sent is a sign itself, once the agent takes it.
                channel.flush() if channel.has_unsent else channel.post(SignOfLife())
            if channel.has_unsent:
                self._watch(channel)
            peer = self._peers[channel]
            if peer.heard <= self.inbox.now - self._lease_s:
                cause = f"nothing was heard of it for {self._lease_s:g} s"
                self._unheard(AgentUnheard(agent=agent, cause=cause))
        self.inbox.call_later(SIGN_EVERY_S, self._give_signs)

    def _unheard(self, event: AgentUnheard) -> None:
        """Tell so behind what its engine has told by now, and what follows from that."""
        self._give_up(event.agent, ())
        self.inbox.later(0.0, event)


def _allow_descriptors() -> None:
    """Each trainer and agent takes one: the usual limit of 1024 is too low for a large fleet."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
