"""Who may read from a pipeline that serves processes it did not start.

The server listens on an abstract Unix socket, which leaves no file behind. Both ends check that
the other one runs as the same user and that it knows the pipeline's secret (HMAC-SHA256 over fresh
nonces of both) before they unpickle anything from it.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
from dataclasses import dataclass, field

from optuna_fleet.exceptions import ProtocolError

NONCE_BYTES = 32
_PROOF_BYTES = 32
_CREDENTIALS = struct.Struct("3i")
_LIMIT_S = 120
_FOREVER_S = 0
_BACKLOG = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a pipeline is served, and the secret to be let in.

    Attributes:
        name: Name of the socket; abstract, so the kernel forgets it with the server.
        secret: Never printed, never sent.
    """

    name: str = field(default_factory=lambda: f"\0optuna-fleet-{secrets.token_hex(16)}")
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    def listen(self) -> socket.socket:
        """Returns a listening socket."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.bind(self.name)
        sock.listen(_BACKLOG)
        return sock

    def connect(self, wish: bytes) -> socket.socket:
        """Returns a connection to the server, which was told the wish (one byte).

        Raises:
            ProtocolError: It is an impostor.
            ConnectionError: It is gone.
            BlockingIOError: It does not answer.
            EOFError: It went away, or refused.
            OSError: This process can't have one more connection.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            _limit(sock, _LIMIT_S)
            sock.connect(self.name)
            self._enter(sock, wish)
            _limit(sock, _FOREVER_S)
        except BaseException:
            sock.close()
            raise
        return sock

    def _enter(self, sock: socket.socket, wish: bytes) -> None:
        if peer_uid(sock) != os.geteuid():
            raise ProtocolError("The pipeline's socket is held by another user's process.")
        theirs, mine = _packet(sock), secrets.token_bytes(NONCE_BYTES)
        sock.sendall(mine + derived(self.secret, b"reader" + wish, mine, theirs) + wish)
        if not hmac.compare_digest(_packet(sock), derived(self.secret, b"server", mine, theirs)):
            raise ProtocolError("The process on the pipeline's socket does not know its secret.")


class Applicant:
    """The server's end of a connection, non-blocking now, whose peer has yet to prove itself.

    Raises:
        ProtocolError: It is another user's process.
        OSError: It is gone.
    """

    def __init__(self, sock: socket.socket, secret: bytes) -> None:
        if peer_uid(sock) != os.geteuid():
            raise ProtocolError("A process of another user tried to read from the pipeline.")
        self._sock = sock
        self._secret = secret
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        sock.setblocking(False)
        sock.send(self._nonce)

    def admit(self) -> bytes:
        """Call when the socket is readable; returns what the peer wishes.

        Raises:
            ProtocolError: It does not know the secret.
            OSError: It is gone.
        """
        answer = self._sock.recv(NONCE_BYTES + _PROOF_BYTES + 1)
        theirs, wish = answer[:NONCE_BYTES], answer[NONCE_BYTES + _PROOF_BYTES :]
        proof = answer[NONCE_BYTES : NONCE_BYTES + _PROOF_BYTES]
        if not hmac.compare_digest(
            proof, derived(self._secret, b"reader" + wish, theirs, self._nonce)
        ):
            raise ProtocolError("A process that does not know the secret tried to read.")
        self._sock.send(derived(self._secret, b"server", theirs, self._nonce))
        return wish


def derived(secret: bytes, purpose: bytes, client: bytes, server: bytes) -> bytes:
    """Returns a proof that one knows the secret, for the nonces of a connection's ends."""
    return hmac.digest(secret, purpose + client + server, "sha256")


def peer_uid(sock: socket.socket) -> int:
    """Returns the user of the process at the other end."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(data)[1])


def _limit(sock: socket.socket, seconds: int) -> None:
    """How long to wait. By the kernel: with Python's limits nobody waits behind many others."""
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))


def _packet(sock: socket.socket) -> bytes:
    packet = sock.recv(NONCE_BYTES)
    if len(packet) != NONCE_BYTES:
        raise EOFError
    return packet
