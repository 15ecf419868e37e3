"""Starts the process that gives this node's chunks to others, and tells the node's what to ask."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable

from optuna_fleet.executor.cluster.agent.backoff import Backoff
from optuna_fleet.executor.fleet.listener import Listener
from optuna_fleet.pipeline import PipelineServer
from optuna_fleet.pipeline.exchange.peers import Peers
from optuna_fleet.pipeline.exchange.plan import Peer, Plan
from optuna_fleet.pipeline.server.workers import Spawn
from optuna_fleet.pipeline.wire import Port, send
from optuna_fleet.wire.node_messages import ChunksShared, ShareChunks
from optuna_fleet.wire.tls import make_certificate

GIVER = -2
"""What `Backoff` knows the process by."""

_READER = "other nodes"


class Sharing:
    """The agent's side of the exchange between nodes.

    Args:
        peers: What its forks know of the others.
        server: The node's pipeline.
        host: Address under which other nodes reach this one.
        has_tls: Whether connections are encrypted: beyond loopback.
        look_ahead: See `Giver`.
        spawn: Forks a process.
        selector: The agent's.
        close_inherited: Called first in it.
        say: Sends to the driver: `ChunksShared` whenever others can connect.
        backoff: When to start it again.

    Attributes:
        pid: Of the process; None while there is none.
    """

    def __init__(
        self,
        peers: Peers,
        server: PipelineServer,
        *,
        host: str,
        has_tls: bool,
        look_ahead: int,
        spawn: Spawn,
        selector: selectors.BaseSelector,
        close_inherited: Callable[[], None],
        say: Callable[[ChunksShared], None],
        backoff: Backoff,
    ) -> None:
        self._peers = peers
        self._server = server
        self._host = host
        self._has_tls = has_tls
        self._look_ahead = look_ahead
        self._spawn = spawn
        self._selector = selector
        self._close_inherited = close_inherited
        self._say = say
        self._backoff = backoff
        self._news: Port | None = None
        self.pid: int | None = None

    def start(self) -> None:
        """Start the process, if there is none; later, if that is not possible now."""
        if self.pid is not None:
            return
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:  # too many open files
            self._backoff.failed(GIVER)
            return

        def main(sock: socket.socket) -> None:
            ours.close()
            self._close_inherited()
            self._give(sock, theirs)

        with theirs:
            try:
                self.pid, sock = self._spawn(main)
            except OSError:  # or processes
                ours.close()
                self._backoff.failed(GIVER)
                return
        self._backoff.started(GIVER)
        self._news = Port(ours, self._selector, on_message=self._tell, on_close=lambda: None)
        self._server.add_reader(_READER, sock)

    def _give(self, sock: socket.socket, news: socket.socket) -> None:
        from optuna_fleet.pipeline.exchange.giver import Giver  # needs torch, as all readers do

        giver = Giver(self._peers, sock, news, look_ahead=self._look_ahead)
        certificate = make_certificate() if self._has_tls else None
        secret = self._peers.secret
        listener = Listener(self._host, secret, giver.welcome, certificate=certificate)
        peer = Peer(
            agent=self._peers.agent,
            host=self._host,
            port=listener.port,
            fingerprint=certificate.fingerprint if certificate else None,
        )
        send(news, ChunksShared(peer=peer))
        giver.serve()

    def _tell(self, message: object) -> None:
        assert isinstance(message, ChunksShared)
        self._say(message)

    def act(self, message: ShareChunks | Plan) -> None:
        """Do what the driver says."""
        if isinstance(message, ShareChunks):
            self.start()
            return
        self._peers.follow(message)
        if self._news is not None:
            self._news.send(message)

    def exited(self, pid: int) -> bool:
        """Tells that a child was reaped; returns whether it was this process."""
        if pid != self.pid:
            return False
        if self._news is not None:
            self._news.close()
        self.pid = self._news = None
        self._server.remove_reader(_READER)
        return True

    def close_in_child(self) -> None:
        """Close what a forked child inherited."""
        if self._news is not None:
            self._news.close_in_child()
