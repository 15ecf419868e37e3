"""Starts the process that gives this node's chunks to others, and tells the node's what to ask."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass

from optuna_fleet.executor.cluster.agent.backoff import Backoff
from optuna_fleet.executor.fleet.listener import Listener
from optuna_fleet.pipeline import PipelineServer
from optuna_fleet.pipeline.exchange.peers import Peers
from optuna_fleet.pipeline.exchange.plan import Peer, Plan
from optuna_fleet.pipeline.server.workers import Spawn
from optuna_fleet.pipeline.wire import Port, send
from optuna_fleet.wire.node_messages import ChunksShared, ShareChunks

GIVER = -2
"""What `Backoff` knows the process by."""

_READER = "other nodes"


@dataclass(slots=True, eq=False)
class Sharing:
    """The agent's side of the exchange between nodes.

    Attributes:
        host: Address under which other nodes reach this one.
        look_ahead: See `Giver`.
        close_inherited: Called first in the process.
        say: Sends to the driver: `ChunksShared` whenever others can connect.
        pid: Of the process; None while there is none.
    """

    peers: Peers
    server: PipelineServer
    host: str
    look_ahead: int
    spawn: Spawn
    selector: selectors.BaseSelector
    close_inherited: Callable[[], None]
    say: Callable[[object], None]
    backoff: Backoff
    pid: int | None = None
    _news: Port | None = None

    def start(self) -> None:
        """Start the process, if there is none; later, if that is not possible now."""
        if self.pid is not None:
            return
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:  # too many open files
            self.backoff.failed(GIVER)
            return

        def main(sock: socket.socket) -> None:
            ours.close()
            self.close_inherited()
            self._give(sock, theirs)

        with theirs:
            try:
                self.pid, sock = self.spawn(main)
            except OSError:  # or processes
                ours.close()
                self.backoff.failed(GIVER)
                return
        self.backoff.started(GIVER)
        self._news = Port(ours, self.selector, on_message=self.say, on_close=lambda: None)
        self.server.add_reader(_READER, sock)

    def _give(self, sock: socket.socket, news: socket.socket) -> None:
        from optuna_fleet.pipeline.exchange.giver import Giver  # needs torch, as all readers do

        giver = Giver(self.peers, sock, news, look_ahead=self.look_ahead)
        listener = Listener(self.host, self.peers.credentials, giver.welcome)
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
        self.pid = self._news = None
        self.server.remove_reader(_READER)
        return True

    def close_in_child(self) -> None:
        """Close what a forked child inherited."""
        if self._news is not None:
            self._news.close_in_child()
