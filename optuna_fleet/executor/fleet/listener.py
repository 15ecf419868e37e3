"""Where agents and trainers knock: lets in who knows the sweep's secret, and nobody else.

One thread, however many strangers come. What a stranger gets of this process is a descriptor for
a while, and the few bytes of the handshake; there is no length for it to lie about. Beyond
loopback TLS comes first, of which it gets the handshake's memory for that while.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.wire.channel import (
    HANDSHAKE_LIMIT_S,
    HELLO,
    NONCE_BYTES,
    TLS_ONLY,
    Channel,
    derived,
)
from optuna_fleet.wire.invitation import join_address
from optuna_fleet.wire.tls import Certificate, TlsSocket

_ANSWER_BYTES = len(HELLO) + NONCE_BYTES + 32
_BACKLOG = 1024
_MAX_APPLICANTS = 128
_TURN_S = 0.5  # no applicant makes room for another one before this
_QUIET_S = 60.0
_RETRY_S = 0.1


@dataclass(slots=True, eq=False)
class _Applicant:
    sock: socket.socket
    address: str
    deadline: float
    nonce: bytes = field(default_factory=lambda: os.urandom(NONCE_BYTES), repr=False)
    answer: bytes = b""


class Listener:
    """Accepts authenticated connections on a background thread.

    Args:
        host: Address to bind; None for all.
        on_connect: Called on a background thread with each authenticated channel.
        on_refusal: Called there with a sentence when strangers came; at most once a minute.
        certificate: What is shown to clients; None if there is no TLS.

    Raises:
        FleetConfigError: The address can't be bound.
    """

    def __init__(
        self,
        host: str | None,
        secret: bytes,
        on_connect: Callable[[Channel], None],
        on_refusal: Callable[[str], None] = lambda text: None,
        *,
        port: int = 0,
        certificate: Certificate | None = None,
    ) -> None:
        self._secret = secret
        self._on_connect = on_connect
        self._on_refusal = on_refusal
        self._closed = threading.Event()
        self._applicants: list[_Applicant] = []  # the oldest first
        self._is_pausing = False
        self._num_refused = 0
        self._refused = ""
        self._quiet_until = 0.0
        self._certificate = certificate
        self._socket = _bound(host, port)
        self._socket.setblocking(False)
        self.host, self.port = self._socket.getsockname()[:2]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ, None)
        self._thread = threading.Thread(
            target=self._serve, name="optuna-fleet-accept", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Accept no more connections."""
        self._closed.set()
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._socket.close()

    # -- on the thread ----------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._closed.is_set():
            for key, _ in self._selector.select(self._patience_s()):
                if key.data is None:
                    self._accept()
                elif key.data in self._applicants:  # not crowded out a moment ago
                    self._hear(key.data)
            now = time.monotonic()
            while self._applicants and self._applicants[0].deadline <= now:
                self._refuse(self._applicants[0], "did not prove itself in time")
            if self._is_pausing and not self._is_full():
                self._is_pausing = False
                self._selector.register(self._socket, selectors.EVENT_READ, None)
            if self._num_refused and self._quiet_until <= now:
                self._report(now)
        for applicant in self._applicants:
            applicant.sock.close()
        self._selector.close()

    def _patience_s(self) -> float | None:
        times = [applicant.deadline for applicant in self._applicants[:1]]
        if self._num_refused:
            times.append(self._quiet_until)
        if self._is_pausing:
            times.append(times[0] - HANDSHAKE_LIMIT_S + _TURN_S)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _is_full(self) -> bool:
        """Whether all have come just now, as when a large fleet starts."""
        if len(self._applicants) < _MAX_APPLICANTS:
            return False
        return self._applicants[0].deadline - time.monotonic() > HANDSHAKE_LIMIT_S - _TURN_S

    def _accept(self) -> None:
        if self._is_full():  # who comes waits in the kernel's queue
            self._is_pausing = True
            self._selector.unregister(self._socket)
            return
        try:
            sock, address = self._socket.accept()
        except BlockingIOError:
            return  # it went away again
        except OSError:
            # Closed, or out of file descriptors, which may pass.
            if not self._closed.wait(_RETRY_S) and self._applicants:
                self._refuse(self._applicants[0], "was in the way: too many files are open")
            return
        if len(self._applicants) >= _MAX_APPLICANTS:
            self._refuse(self._applicants[0], "was one of too many at once")
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._certificate is not None:
            sock = TlsSocket(sock, self._certificate.context)
        applicant = _Applicant(
            sock=sock,
            address=join_address(address[0].removeprefix("::ffff:"), address[1]),
            deadline=time.monotonic() + HANDSHAKE_LIMIT_S,
        )
        self._applicants.append(applicant)
        self._selector.register(sock, selectors.EVENT_READ, applicant)
        if not isinstance(sock, TlsSocket):
            self._say(applicant, HELLO + applicant.nonce)

    def _hear(self, applicant: _Applicant) -> None:
        sock = applicant.sock
        try:
            if isinstance(sock, TlsSocket) and not sock.has_shaken_hands:
                self._shake_hands(applicant, sock)
                return
            heard = sock.recv(_ANSWER_BYTES - len(applicant.answer))
        except BlockingIOError:
            return  # a part of a record
        except OSError:
            heard = b""
        applicant.answer += heard
        if not heard:
            self._refuse(applicant, "hung up before it had proved itself")
        elif applicant.answer[: len(HELLO)] != HELLO[: len(applicant.answer)]:
            self._refuse(applicant, "does not speak this protocol")
        elif len(applicant.answer) == _ANSWER_BYTES:
            self._check_proof(applicant)

    def _shake_hands(self, applicant: _Applicant, sock: TlsSocket) -> None:
        try:
            sock.shake_hands()
        except ssl.SSLError:
            with contextlib.suppress(OSError):
                socket.socket.send(sock, TLS_ONLY)
            self._refuse(applicant, "does not speak TLS 1.3")
        else:
            if sock.has_shaken_hands:
                self._say(applicant, HELLO + applicant.nonce)

    def _check_proof(self, applicant: _Applicant) -> None:
        server, answer = applicant.nonce, applicant.answer[len(HELLO) :]
        client, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
        if not hmac.compare_digest(proof, derived(self._secret, b"client", client, server)):
            self._say(applicant, bytes(len(proof)))  # it may be a client that got the wrong port
            self._refuse(applicant, "does not know this sweep's secret")
            return
        self._say(applicant, derived(self._secret, b"server", client, server))
        self._forget(applicant)
        self._on_connect(
            Channel(
                applicant.sock,
                outgoing=derived(self._secret, b"from server", client, server),
                incoming=derived(self._secret, b"from client", client, server),
            )
        )

    def _say(self, applicant: _Applicant, words: bytes) -> None:
        with contextlib.suppress(OSError):  # if it is gone, that will be heard
            applicant.sock.send(words)

    def _refuse(self, applicant: _Applicant, why: str) -> None:
        self._forget(applicant)
        applicant.sock.close()
        self._num_refused += 1
        self._refused = f"{applicant.address} {why}"

    def _forget(self, applicant: _Applicant) -> None:
        self._applicants.remove(applicant)
        self._selector.unregister(applicant.sock)

    def _report(self, now: float) -> None:
        others = f", and {self._num_refused - 1} before it" if self._num_refused > 1 else ""
        self._quiet_until, self._num_refused = now + _QUIET_S, 0
        self._on_refusal(
            f"A stranger was refused on the control channel: {self._refused}{others}. The sweep "
            f"goes on; further ones are reported after {_QUIET_S:g} s."
        )


def _bound(host: str | None, port: int) -> socket.socket:
    try:
        if host is None:
            with contextlib.suppress(OSError):  # there may be no IPv6
                return socket.create_server(
                    ("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
                )
        where = (host or "", port)
        family = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server(where, family=family, backlog=_BACKLOG)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        raise FleetConfigError(
            f"The driver can't listen on {join_address(host or '*', port)}: {error}. Give an "
            "address of this machine and a port that is free, or none."
        ) from error
