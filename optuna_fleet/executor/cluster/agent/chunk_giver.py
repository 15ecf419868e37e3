"""Starts the process that gives this node's chunks to others, and tells the node's what to ask."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from optuna_fleet.executor.cluster.agent.children import Kept
from optuna_fleet.pipeline.exchange import Giver, Peer, Peers, Plan
from optuna_fleet.pipeline.server.server import PipelineServer
from optuna_fleet.pipeline.server.workers import Spawn
from optuna_fleet.pipeline.wire import Port, send
from optuna_fleet.wire.inbox import Inbox
from optuna_fleet.wire.listener import Listener
from optuna_fleet.wire.node_messages import ChunksShared, ShareChunks

_READER = "other nodes"


@dataclass(slots=True, eq=False)
class Sharing:
    """The agent's side of the exchange between nodes.

    Attributes:
        host: Address under which other nodes reach this one.
        look_ahead: See `Giver`.
        close_inherited: Called first in the process.
        say: Sends to the driver: `ChunksShared` whenever others can connect.
        process: The one that gives.
    """

    peers: Peers
    server: PipelineServer
    host: str
    look_ahead: int
    spawn: Spawn
    selector: selectors.BaseSelector
    close_inherited: Callable[[], None]
    say: Callable[[object], None]
    process: Kept = field(init=False)
    _news: Port | None = None

    def __post_init__(self) -> None:
        self.process = Kept(self._spawned, lambda sock: self.server.add_reader(_READER, sock))

    @property
    def pid(self) -> int | None:
        """Of the process; None while there is none."""
        return self.process.pid

    def start(self) -> None:
        """Start the process, if there is none; later, if that is not possible now."""
        if self.pid is None:
            self.process.start()

    def _spawned(self) -> tuple[int, socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        def main(sock: socket.socket) -> None:
            ours.close()
            self.close_inherited()
            self._give(sock, theirs)

        with theirs:
            try:
                spawned = self.spawn(main)
            except OSError:
                ours.close()
                raise
        self._news = Port(ours, self.selector, on_message=self.say, on_close=lambda: None)
        return spawned

    def _give(self, sock: socket.socket, news: socket.socket) -> None:
        giver = Giver(self.peers, sock, news, look_ahead=self.look_ahead)
        inbox = Inbox()
        listener = Listener(inbox, self.host, self.peers.credentials, giver.welcome)
        threading.Thread(target=inbox.get, daemon=True).start()
        peer = Peer(agent=self.peers.agent, host=self.host, port=listener.port)
        send(news, ChunksShared(peer=peer))
        giver.serve()

    def act(self, message: ShareChunks | Plan) -> None:
        """Do what the driver says."""
        if isinstance(message, ShareChunks):
            self.start()
            return
        self.peers.follow(message)
        if self._news is not None:
            self._news.send(message)

    def exited(self, pid: int) -> bool:
        """Tells that a child was reaped; returns whether it was this process."""
        if pid != self.pid:
            return False
        if self._news is not None:
            self._news.close()
        self.process.pid = self._news = None
        self.server.remove_reader(_READER)
        return True
