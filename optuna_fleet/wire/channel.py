"""The control channel: framed messages between driver, agents and trainers, in mutual TLS.

Nothing is unpickled, and no length is used, of a peer that has not shown the sweep's certificate
(`optuna_fleet.wire.invitation`): who has let in whom is known before a `Channel` is made.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import select
import socket
import ssl
import struct
import threading
import time
from collections import deque
from typing import Any

from optuna_fleet.exceptions import ProtocolError
from optuna_fleet.wire.invitation import Invitation, join_address, tls_context

HELLO = b"optuna-fleet 3"
"""What who listens says first, as soon as it has let in who comes."""

HANDSHAKE_LIMIT_S = 10.0

_RETRY_S = 0.1
# A machine that has vanished is found out in five minutes. Not much sooner: a trainer, which says
# something now and then only, is to outlive what passes in the network.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 30), (socket.TCP_KEEPCNT, 8))
_LENGTH = struct.Struct("!Q")
_MAX_BYTES = 4 << 30
_JOINED_BYTES = 1 << 16  # larger ones are not copied
_PIECE_BYTES = 1 << 18
_UNKNOWN = (AttributeError, ImportError, TypeError, ValueError, pickle.UnpicklingError)
"""What unpickling raises for what other versions know."""


class Channel:
    """One end of a connection; it carries records of `optuna_fleet.wire.messages`.

    A frame is the length of the pickled message, and that. A message's end is that of a TLS
    record: when it was read, what follows is in the socket, which stays readable.

    Any thread may send, one may receive. None waits for another that waits for the peer.

    Args:
        sock: Has shaken hands; the channel owns it from now on.
    """

    def __init__(self, sock: ssl.SSLSocket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._lock = threading.Lock()  # OpenSSL is for one thread at a time; nobody waits within
        self._unsent: deque[memoryview] = deque()  # frames
        self._unsendable: OSError | None = None
        self._broken: Exception | None = None
        self._expect(_LENGTH.size, is_head=True)

    # -- sending ----------------------------------------------------------------------------------

    def send(self, message: Any) -> None:
        """Send one message, waiting until the peer can take it.

        Raises:
            ProtocolError: It is too large.
            OSError: The peer is gone.
        """
        self.post(message)
        while self._unsent:
            self._wait(select.POLLOUT, None)
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
        head = _LENGTH.pack(len(data))
        self.flush(*((head + data,) if len(data) <= _JOINED_BYTES else (head, data)))

    def flush(self, *more: bytes | memoryview) -> None:
        """Send of what was posted as much as the peer takes now; it raises as `send` does."""
        with self._lock:
            if self._unsendable is not None:  # one more try, and OpenSSL would not read any more
                raise self._unsendable
            self._unsent += map(memoryview, more)
            try:
                while self._unsent:
                    rest = self._unsent[0]
                    rest = rest[self._sock.send(rest[:_PIECE_BYTES]) :]
                    if rest:
                        self._unsent[0] = rest
                    else:
                        self._unsent.popleft()
            except ssl.SSLWantWriteError:
                pass  # OpenSSL wants the same piece again
            except OSError as error:
                self._unsent.clear()
                self._unsendable = error
                raise

    @property
    def has_unsent(self) -> bool:
        """Whether something that was posted waits for the peer."""
        return bool(self._unsent)

    # -- receiving --------------------------------------------------------------------------------

    def receive(self, limit_s: float | None = None) -> Any:
        """Return the next message, waiting for it.

        Raises:
            EOFError: The peer is gone.
            ConnectionAbortedError: What arrived is not what the peer sent, or is not known here.
            TimeoutError: It has not come within so many seconds.
            OSError: The connection broke.
        """
        data = self.receive_bytes(limit_s)
        try:
            return pickle.loads(data)
        except _UNKNOWN as error:
            raise ConnectionAbortedError(
                f"A message of the control channel can't be read ({error}): its sender has "
                "another version of optuna_fleet, or of Python. The connection was cut."
            ) from error

    def receive_bytes(self, limit_s: float | None = None) -> memoryview:
        """Return what was sent by `post_bytes`, waiting for it; it raises as `receive` does."""
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while not self.has_message():
            self._wait(select.POLLIN, deadline)
        if self._broken is not None:
            raise self._broken
        data = memoryview(self._piece)
        self._expect(_LENGTH.size, is_head=True)
        return data

    def has_message(self) -> bool:
        """Whether `receive` would return, or raise, at once; a part of a message is none."""
        try:
            while self._broken is None and (self._is_head or self._filled < len(self._piece)):
                with self._lock:
                    received = self._sock.recv_into(memoryview(self._piece)[self._filled :])
                if not received:
                    raise EOFError
                self._filled += received
                if self._is_head and self._filled == _LENGTH.size:
                    self._expect(_LENGTH.unpack(self._piece)[0], is_head=False)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        except ssl.SSLError as error:
            self._broken = ConnectionAbortedError(
                f"Somebody tampered with a connection of the control channel: {error}. The "
                "connection was cut."
            )
        except (EOFError, OSError) as error:
            self._broken = error
        return True

    def _expect(self, num_bytes: int, *, is_head: bool) -> None:
        self._piece, self._filled, self._is_head = bytearray(num_bytes), 0, is_head

    def _wait(self, event: int, deadline: float | None) -> None:
        waiting = select.poll()
        waiting.register(self._sock, event)
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not waiting.poll(None if left_s is None else math.ceil(1e3 * left_s)):
            raise TimeoutError("The other end of a connection was silent for too long.")

    # -- both -------------------------------------------------------------------------------------

    def fileno(self) -> int:
        """File descriptor that becomes readable when a message or the end arrives."""
        return self._sock.fileno()

    @property
    def has_hung_up(self) -> bool:
        """Whether the peer is gone, though what it has said may not all have been read."""
        waiting = select.poll()
        try:
            waiting.register(self._sock, select.POLLRDHUP)
        except ValueError:  # it was closed
            return True
        return bool(waiting.poll(0))

    def cut(self) -> None:
        """End the connection, also for a thread of ours that waits on it."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # that of `ssl` ends TLS only

    def close(self) -> None:
        """Close this end."""
        self._sock.close()


def connect(invitation: Invitation) -> Channel:
    """Connect to the driver that made the invitation, at the first address where it answers.

    Raises:
        ProtocolError: Somebody else answers, or this is not the driver's certificate.
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
        sock = tls_context(invitation.credentials, is_server=False).wrap_socket(sock)
        channel = Channel(sock)
        if channel.receive_bytes(HANDSHAKE_LIMIT_S) != HELLO:
            raise ProtocolError("it is another version of optuna_fleet")
        return channel
    except BaseException as error:
        sock.close()
        raise _in_words(error) from error


def _in_words(error: BaseException) -> BaseException:
    match error:
        case ssl.SSLCertVerificationError():
            return ProtocolError(
                "its certificate is not the one that the token was made for: it belongs to "
                "another sweep, or somebody is in between"
            )
        case EOFError() | ssl.SSLEOFError():
            return ConnectionResetError("it closed the connection during the handshake")
        case ssl.SSLError():
            return ProtocolError(f"it does not speak TLS 1.3 ({error.reason or error})")
    return error
