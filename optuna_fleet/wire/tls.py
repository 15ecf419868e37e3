"""TLS 1.3 for the control channel beyond loopback; the driver's certificate is pinned."""

from __future__ import annotations

import datetime
import os
import socket
import ssl
import struct
import threading
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from typing import Any

from optuna_fleet.exceptions import ProtocolError

_HEAD = struct.Struct("!BHH")  # of a record: type, version, length
_TYPES = range(20, 24)
_MAX_RECORD_BYTES = (1 << 14) + 256
_MAX_HANDSHAKE_BYTES = 1 << 14  # ours take less than 3,000
_PIECE_BYTES = 1 << 18


class TlsSocket(socket.socket):
    """A connected socket with TLS over it, fit for non-blocking use and for several threads.

    The sockets of `ssl` take no flags, and a thread that waits on one keeps the others from it.
    Here the lock is held to encrypt and to decrypt only. One thread may receive, one send.

    One record at a time is taken from the network, and what is sent by two calls never shares one:
    when the last byte of a message was read, what follows is in the socket, which stays readable.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        is_server = context.protocol is ssl.PROTOCOL_TLS_SERVER
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._to_send, server_side=is_server)
        self._lock = threading.Lock()
        self._record = bytearray()  # as much of the next one as has arrived
        self._sealed, self._num_sealed = memoryview(b""), 0
        self._num_heard = 0
        self.has_shaken_hands = False
        timeout_s = sock.gettimeout()
        super().__init__(fileno=sock.detach())
        self.settimeout(timeout_s)

    # -- the handshake ----------------------------------------------------------------------------

    def shake_hands(self) -> None:
        """Take one record of the peer's; see `has_shaken_hands`.

        Raises:
            BlockingIOError: It has not arrived, or not all of it.
            ssl.SSLError: The peer does not speak TLS 1.3.
            OSError: The connection broke.
        """
        if not self._take_record(0):
            raise ConnectionResetError("The other end closed the connection during the handshake.")
        if self._num_heard > _MAX_HANDSHAKE_BYTES:
            raise ssl.SSLError("the handshake is too long")
        self.begin()

    def begin(self) -> None:
        """Say what can be said now: a client speaks first."""
        try:
            self._tls.do_handshake()
            self.has_shaken_hands = True
        except ssl.SSLWantReadError:
            pass
        super().sendall(self._to_send.read())

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of the certificate that the peer has shown, and proved to be its own."""
        return sha256(self._tls.getpeercert(binary_form=True) or b"").digest()

    # -- as of a socket ---------------------------------------------------------------------------

    def send(self, data: Any, flags: int = 0) -> int:
        """Send a beginning of `data`; after a `BlockingIOError` it must be given again."""
        if not self._sealed:
            piece = memoryview(data)[:_PIECE_BYTES]
            with self._lock:
                self._tls.write(piece)
                self._sealed, self._num_sealed = memoryview(self._to_send.read()), len(piece)
        while self._sealed:
            self._sealed = self._sealed[super().send(self._sealed, flags) :]
        return self._num_sealed

    def sendall(self, data: Any, flags: int = 0) -> None:
        """Send `data`."""
        rest = memoryview(data)
        while rest:
            rest = rest[self.send(rest, flags) :]

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        """Return at most `bufsize` bytes."""
        data = bytearray(bufsize)
        return bytes(data[: self.recv_into(data, 0, flags)])

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """Fill a beginning of `buffer`, return its length; `nbytes` is not looked at.

        Raises:
            ConnectionAbortedError: What arrived is not what the peer sent.
            OSError: The connection broke, or nothing is there and the flags say not to wait.
        """
        while True:
            if not self._tls.pending() and not self._take_record(flags):
                return 0
            try:
                with self._lock:
                    num_bytes: Any = self._tls.read(len(buffer), buffer)
                return int(num_bytes)
            except ssl.SSLWantReadError:
                pass  # a record without data
            except ssl.SSLError as error:
                raise ConnectionAbortedError(
                    f"Somebody tampered with a connection of the control channel: {error}. The "
                    "connection was cut."
                ) from error

    def _take_record(self, flags: int) -> bool:
        """Read up to the end of a record; return false at the end of the stream."""
        while missing := self._num_missing():
            data = super().recv(missing, flags)
            if not data:
                return False
            self._record += data
        self._received.write(self._record)
        self._num_heard += len(self._record)
        self._record.clear()
        return True

    def _num_missing(self) -> int:
        if len(self._record) < _HEAD.size:
            return int(_HEAD.size - len(self._record))
        kind, _, length = _HEAD.unpack_from(self._record)
        if kind not in _TYPES or length > _MAX_RECORD_BYTES:
            return 0  # no record: OpenSSL says so
        return int(_HEAD.size + length - len(self._record))


def connect_tls(sock: socket.socket, fingerprint: bytes) -> TlsSocket:
    """Shake hands with a driver, and check that it is the one with this certificate.

    Raises:
        ProtocolError: It is another one, or uses no TLS.
        OSError: The connection broke.
    """
    tls = TlsSocket(sock, _client_context())
    try:
        tls.begin()
        while not tls.has_shaken_hands:
            tls.shake_hands()
        if tls.fingerprint != fingerprint:
            raise ProtocolError(
                "its certificate is not the one that the token was made for: it belongs to "
                "another driver, or somebody is in between"
            )
    except ssl.SSLError as error:
        tls.close()
        raise ProtocolError(f"it does not speak TLS 1.3 ({error.reason or error})") from error
    except BaseException:
        tls.close()
        raise
    return tls


@cache
def _client_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the fingerprint says whose it is
    context.verify_mode = ssl.CERT_NONE
    return context


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """A driver's certificate, which nobody signed but itself, and its key.

    Attributes:
        fingerprint: SHA-256 of the certificate, by which clients know it.
        context: With which a server shows it.
    """

    fingerprint: bytes
    context: ssl.SSLContext = field(repr=False)


def make_certificate() -> Certificate:
    """Make a key and a certificate for one driver; they are never in a file that has a name."""
    from cryptography import x509  # takes a while, and on loopback nobody needs it
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "optuna-fleet")])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=3650))
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # nobody comes back with one
    with os.fdopen(os.memfd_create("certificate"), "wb") as file:  # `ssl` wants a file
        file.write(certificate.public_bytes(serialization.Encoding.PEM) + private)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return Certificate(
        fingerprint=sha256(certificate.public_bytes(serialization.Encoding.DER)).digest(),
        context=context,
    )
