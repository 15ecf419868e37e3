"""The control channel: authenticated, framed messages between driver, agents and trainers.

Both ends prove that they know the sweep's secret (HMAC-SHA256 over fresh nonces of both sides)
before anything is unpickled; nothing is ever unpickled from a peer that has not.
"""

from __future__ import annotations

import hmac
import os
import pickle
import socket
import struct
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from optuna_fleet.exceptions import ProtocolError

_NONCE_BYTES = 32
_HANDSHAKE_LIMIT_S = 10.0
_RETRY_S = 0.1
_HELLO = b"optuna-fleet 1"


class Channel:
    """One end of an authenticated connection; it carries records of `optuna_fleet.messages`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, message: Any) -> None:
        """Send one message.

        Raises:
            OSError: The peer is gone.
        """
        data = pickle.dumps(message)
        with self._sending:
            self._connection.send_bytes(data)

    def receive(self) -> Any:
        """Return the next message, waiting for it.

        Raises:
            EOFError: The peer is gone.
        """
        return pickle.loads(self._connection.recv_bytes())

    def has_message(self) -> bool:
        """Whether `receive` would return at once."""
        return self._connection.poll(0)

    def fileno(self) -> int:
        """File descriptor that becomes readable when a message or the end arrives."""
        return self._connection.fileno()

    @property
    def is_closed(self) -> bool:
        """Whether this end was closed."""
        return self._connection.closed

    def close(self) -> None:
        """Close this end."""
        self._connection.close()


def connect(host: str, port: int, secret: bytes) -> Channel:
    """Connect to a `Listener` and prove knowledge of `secret`.

    Raises:
        ProtocolError: The listener does not know the secret.
        OSError: It can't be reached.
    """
    sock = socket.create_connection((host, port), timeout=_HANDSHAKE_LIMIT_S)
    return _authenticated(sock, secret, b"client", b"server")


class Listener:
    """Accepts authenticated connections on a background thread.

    Args:
        host: Address to bind; loopback for a local cluster.
        secret: Shared secret of the sweep.
        on_connect: Called on a background thread with each authenticated channel.
    """

    def __init__(self, host: str, secret: bytes, on_connect: Callable[[Channel], None]) -> None:
        self._secret = secret
        self._on_connect = on_connect
        self._closed = threading.Event()
        self._socket = socket.create_server((host, 0), backlog=128)
        self.host, self.port = self._socket.getsockname()[:2]
        threading.Thread(target=self._accept, name="optuna-fleet-accept", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
                # A thread each: a peer that stalls its handshake must not keep the others out.
                threading.Thread(target=self._welcome, args=(sock,), daemon=True).start()
            except (OSError, RuntimeError):
                # Closed, or out of file descriptors or threads, which may pass.
                if self._closed.wait(_RETRY_S):
                    return

    def _welcome(self, sock: socket.socket) -> None:
        try:
            channel = _authenticated(sock, self._secret, b"server", b"client")
        except (ProtocolError, OSError, EOFError):
            return
        self._on_connect(channel)

    def close(self) -> None:
        """Accept no more connections."""
        self._closed.set()
        # shutdown() wakes the accepting thread; close() alone would leave it and the port behind.
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _authenticated(sock: socket.socket, secret: bytes, me: bytes, peer: bytes) -> Channel:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    limit = struct.pack("ll", int(_HANDSHAKE_LIMIT_S), 0)
    no_limit = struct.pack("ll", 0, 0)
    sock.setblocking(True)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection = Connection(sock.detach())
    try:
        _handshake(connection, secret, me, peer)
    except BaseException:
        connection.close()
        raise
    with socket.fromfd(connection.fileno(), socket.AF_INET, socket.SOCK_STREAM) as duplicate:
        duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, no_limit)
    return Channel(connection)


def _handshake(connection: Connection, secret: bytes, me: bytes, peer: bytes) -> None:
    mine = os.urandom(_NONCE_BYTES)
    connection.send_bytes(_HELLO + mine)
    hello = connection.recv_bytes(len(_HELLO) + _NONCE_BYTES)
    theirs = hello[len(_HELLO) :]
    if not hello.startswith(_HELLO) or len(theirs) != _NONCE_BYTES:
        raise ProtocolError("The peer on the control channel does not speak this protocol.")
    connection.send_bytes(_proof(secret, me, mine, theirs))
    proof = connection.recv_bytes(64)
    if not hmac.compare_digest(proof, _proof(secret, peer, theirs, mine)):
        raise ProtocolError("The peer on the control channel does not know this sweep's secret.")


def _proof(secret: bytes, role: bytes, own_nonce: bytes, peer_nonce: bytes) -> bytes:
    return hmac.digest(secret, role + own_nonce + peer_nonce, "sha256")
