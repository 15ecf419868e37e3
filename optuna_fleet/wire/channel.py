"""The control channel: authenticated, framed messages between driver, agents and trainers.

Both ends prove that they know the sweep's secret (HMAC-SHA256 over fresh nonces of both). From
then on every frame carries authentication codes under keys that only the two ends of this one
connection have: if a frame was altered, repeated, left out or sent back, the connection is closed.
Nothing is unpickled, and no length is used, before its code was checked. Beyond loopback all of
this is within TLS (`optuna_fleet.wire.tls`).
"""

from __future__ import annotations

import contextlib
import hmac
import os
import pickle
import select
import socket
import struct
import threading
import time
from collections import deque
from hashlib import blake2b
from typing import Any

from optuna_fleet.exceptions import ProtocolError
from optuna_fleet.wire.invitation import Invitation, join_address
from optuna_fleet.wire.tls import connect_tls

HELLO = b"optuna-fleet 2"
TLS_ONLY = b"optuna-fleet T"  # to who speaks no TLS where it is wanted
NONCE_BYTES = 32
HANDSHAKE_LIMIT_S = 10.0

_RETRY_S = 0.1
# A machine that has vanished is found out in five minutes. Not much sooner: a trainer, which says
# something now and then only, is to outlive what passes in the network.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 30), (socket.TCP_KEEPCNT, 8))
_HASH_BYTES = 32
_PROOF_BYTES = 16
_LENGTH = struct.Struct("!Q")
_HEAD_BYTES = _LENGTH.size + _PROOF_BYTES
_MAX_BYTES = 4 << 30
_JOINED_BYTES = 1 << 16  # larger ones are not copied
_UNKNOWN = (AttributeError, ImportError, TypeError, ValueError, pickle.UnpicklingError)
"""What unpickling raises for what other versions know."""


class Channel:
    """One end of an authenticated connection; it carries records of `optuna_fleet.wire.messages`.

    A frame is the length of the pickled message and its proof, the message's proof, the message.
    A proof is a message authentication code (keyed BLAKE2b).

    Any thread may send, one may receive. None waits for another that waits for the peer.

    Args:
        sock: Connected, perhaps a `TlsSocket`; the channel owns it from now on.
    """

    def __init__(self, sock: socket.socket, *, outgoing: bytes, incoming: bytes) -> None:
        sock.settimeout(None)
        self._sock = sock
        self._sending = threading.Lock()
        self._outgoing, self._incoming = _Proofs(outgoing), _Proofs(incoming)
        self._unsent: deque[memoryview] = deque()  # frames
        self._expect(_HEAD_BYTES)
        self._has_head = False

    # -- sending ----------------------------------------------------------------------------------

    def send(self, message: Any) -> None:
        """Send one message, waiting until the peer can take it.

        Raises:
            ProtocolError: It is too large.
            OSError: The peer is gone.
        """
        self.post(message)
        while self.has_unsent:
            writable = select.poll()
            writable.register(self._sock, select.POLLOUT)
            writable.poll()
            self.flush()

    def post(self, message: Any) -> None:
        """As `send`, without waiting: `flush` sends what the peer does not take now."""
        data = pickle.dumps(message)
        if len(data) > _MAX_BYTES:
            raise ProtocolError(
                f"A {type(message).__name__} takes {len(data):,} bytes, but at most "
                f"{_MAX_BYTES:,} can be sent. Does the objective hold data? Then give them to the "
                "SharedPipeline, or load them inside the objective."
            )
        self.post_bytes(data)

    def post_bytes(self, data: bytes | memoryview) -> None:
        """As `post`, for bytes; what is large must not change until it is sent."""
        with self._sending:
            self._unsent += map(memoryview, self._frame(data))
        self.flush()

    def _frame(self, data: bytes | memoryview) -> tuple[bytes | memoryview, ...]:
        length = _LENGTH.pack(len(data))
        head = b"".join((length, self._outgoing.of(length), self._outgoing.of(data)))
        return (head + data,) if len(data) <= _JOINED_BYTES else (head, data)

    def flush(self) -> None:
        """Send of what was posted as much as the peer takes now; it raises as `send` does."""
        with self._sending:
            try:
                while self._unsent:
                    rest = self._unsent[0]
                    rest = rest[self._sock.send(rest, socket.MSG_DONTWAIT) :]
                    if rest:
                        self._unsent[0] = rest
                    else:
                        self._unsent.popleft()
            except BlockingIOError:
                pass
            except OSError:
                self._unsent.clear()
                raise

    @property
    def has_unsent(self) -> bool:
        """Whether something that was posted waits for the peer."""
        return bool(self._unsent)

    # -- receiving --------------------------------------------------------------------------------

    def receive(self) -> Any:
        """Return the next message, waiting for it.

        Raises:
            EOFError: The peer is gone.
            ConnectionAbortedError: What arrived is not what the peer sent, or is not known here.
            OSError: The connection broke.
        """
        data = self.receive_bytes()
        try:
            return pickle.loads(data)
        except _UNKNOWN as error:
            raise ConnectionAbortedError(
                f"A message of the control channel can't be read ({error}): its sender has "
                "another version of optuna_fleet, or of Python. The connection was cut."
            ) from error

    def receive_bytes(self) -> memoryview:
        """Return what was sent by `post_bytes`, waiting for it; it raises as `receive` does."""
        self._take_in(0)
        proof, data = self._piece[:_PROOF_BYTES], memoryview(self._piece)[_PROOF_BYTES:]
        self._incoming.check(proof, data)
        self._expect(_HEAD_BYTES)
        self._has_head = False
        return data

    def has_message(self) -> bool:
        """Whether `receive` would return, or raise, at once; a part of a message is none."""
        try:
            self._take_in(socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except (EOFError, OSError):
            pass  # `receive` says it
        return True

    def _expect(self, num_bytes: int) -> None:
        self._piece, self._filled = bytearray(num_bytes), 0

    def _take_in(self, flags: int) -> None:
        """Read up to the end of a message; the rest stays in the socket, which stays readable."""
        if not self._has_head:
            self._fill(flags)
            length = self._piece[: _LENGTH.size]
            self._incoming.check(self._piece[_LENGTH.size :], length)
            self._expect(_PROOF_BYTES + _LENGTH.unpack(length)[0])
            self._has_head = True
        self._fill(flags)

    def _fill(self, flags: int) -> None:
        while self._filled < len(self._piece):
            received = self._sock.recv_into(memoryview(self._piece)[self._filled :], 0, flags)
            if not received:
                raise EOFError
            self._filled += received

    # -- both -------------------------------------------------------------------------------------

    def fileno(self) -> int:
        """File descriptor that becomes readable when a message or the end arrives."""
        return self._sock.fileno()

    @property
    def is_closed(self) -> bool:
        """Whether this end was closed."""
        return self._sock.fileno() < 0

    def cut(self) -> None:
        """End the connection, also for a thread of ours that waits on it."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end."""
        self._sock.close()


class _Proofs:
    """Proofs of what goes one way, each for its place in the sequence."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._place = 0

    def of(self, piece: bytes | bytearray | memoryview) -> bytes:
        """Return the proof of the next piece."""
        proof = blake2b(_LENGTH.pack(self._place), key=self._key, digest_size=_PROOF_BYTES)
        proof.update(piece)
        self._place += 1
        return proof.digest()

    def check(self, proof: bytes | bytearray, piece: bytearray | memoryview) -> None:
        """Check the next piece.

        Raises:
            ConnectionAbortedError: It is not what the peer sent; nor is anything after it.
        """
        place = self._place
        if not hmac.compare_digest(proof, self.of(piece)):
            self._place = place
            raise ConnectionAbortedError(
                "Somebody tampered with a connection of the control channel: a message on it is "
                "not what its sender sent. The connection was cut."
            )


def connect(invitation: Invitation) -> Channel:
    """Connect to the driver that made the invitation, at the first address where it answers.

    Raises:
        ProtocolError: Somebody else answers, or this is not the driver's secret.
        ConnectionRefusedError: Nobody listens, at any of the addresses.
        OSError: It can't be reached.
    """
    deadline = time.monotonic() + HANDSHAKE_LIMIT_S
    while True:
        said: dict[str, Exception] = {}
        for host, port in invitation.addresses:
            try:
                return _enter(host, port, invitation)
            except (OSError, ProtocolError) as error:
                said[join_address(host, port)] = error
        if time.monotonic() >= deadline or not any(map(_may_pass, said.values())):
            raise _summary_of(said)
        time.sleep(_RETRY_S)


def _may_pass(error: Exception) -> bool:
    """Whether the listener had too many unproven connections, perhaps."""
    return isinstance(error, ConnectionError) and not isinstance(error, ConnectionRefusedError)


def _summary_of(said: dict[str, Exception]) -> Exception:
    each = "; ".join(
        f"{address}: {getattr(error, 'strerror', None) or error}"
        for address, error in said.items()
    )
    text = f"The driver can't be joined ({each}). "
    errors = said.values()
    if any(isinstance(error, ProtocolError) for error in errors):
        return ProtocolError(text + "Address and token must be those that the driver has shown.")
    text += "Does it run, and can this machine reach one of its addresses?"
    if all(isinstance(error, ConnectionRefusedError) for error in errors):
        return ConnectionRefusedError(text)
    return ConnectionError(text)


def _enter(host: str, port: int, invitation: Invitation) -> Channel:
    limit_s = HANDSHAKE_LIMIT_S / len(invitation.addresses)
    sock = socket.create_connection((host, port), timeout=limit_s)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # its machine may vanish
        for option, value in ((socket.TCP_NODELAY, 1), *_KEEPALIVE):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        sock.settimeout(HANDSHAKE_LIMIT_S)
        if invitation.fingerprint is not None:
            sock = connect_tls(sock, invitation.fingerprint)
        sock.sendall(HELLO)
        hello = _exactly(sock, len(HELLO))
        if hello == TLS_ONLY:
            raise ProtocolError("it wants TLS, but the token that was given has no fingerprint")
        if hello != HELLO:
            raise ProtocolError("it does not speak this protocol")
        secret, server = invitation.secret, _exactly(sock, NONCE_BYTES)
        client = os.urandom(NONCE_BYTES)
        sock.sendall(client + derived(secret, b"client", client, server))
        proof = derived(secret, b"server", client, server)
        if not hmac.compare_digest(_exactly(sock, _HASH_BYTES), proof):
            raise ProtocolError(
                "it does not know the same secret as this process: they belong to different sweeps"
            )
        return Channel(
            sock,
            outgoing=derived(secret, b"from client", client, server),
            incoming=derived(secret, b"from server", client, server),
        )
    except BaseException:
        sock.close()
        raise


def derived(secret: bytes, purpose: bytes, client: bytes, server: bytes) -> bytes:
    """Return a key or proof derived from the secret and the nonces of a connection's ends."""
    return hmac.digest(secret, purpose + client + server, "sha256")


def _exactly(sock: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        received = sock.recv(num_bytes - len(data))
        if not received:
            raise ConnectionResetError("The other end closed the connection during the handshake.")
        data += received
    return data
