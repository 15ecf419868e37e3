"""Where agents and trainers knock: lets in who has the sweep's certificate, and nobody else.

One thread, however many strangers come. What a stranger gets of this process is a descriptor for
a while, and the memory of a handshake, for which OpenSSL has a limit.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.wire.channel import HANDSHAKE_LIMIT_S, HELLO, Channel
from optuna_fleet.wire.credentials import tls_context
from optuna_fleet.wire.invitation import join_address

_BACKLOG = 1024
_MAX_APPLICANTS = 128
_TURN_S = 0.5  # no applicant makes room for another one before this
_QUIET_S = 60.0
_RETRY_S = 0.1
_NO_CERTIFICATE = ("CERTIFICATE_VERIFY_FAILED", "PEER_DID_NOT_RETURN_A_CERTIFICATE")


@dataclass(slots=True, eq=False)
class _Applicant:
    sock: ssl.SSLSocket
    address: str
    deadline: float


class Listener:
    """Accepts authenticated connections on a background thread.

    Args:
        host: Address to bind; None for all.
        on_connect: Called on a background thread with each authenticated channel.
        on_refusal: Called there with a sentence when strangers came; at most once a minute.

    Raises:
        FleetConfigError: The address can't be bound.
    """

    def __init__(
        self,
        host: str | None,
        credentials: bytes,
        on_connect: Callable[[Channel], None],
        on_refusal: Callable[[str], None] = lambda text: None,
        *,
        port: int = 0,
    ) -> None:
        self._context = tls_context(credentials, is_server=True)
        self._on_connect = on_connect
        self._on_refusal = on_refusal
        self._closed = threading.Event()
        self._applicants: list[_Applicant] = []  # the oldest first
        self._is_pausing = False
        self._num_refused = 0
        self._refused = ""
        self._quiet_until = 0.0
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
        self._welcome(sock, join_address(address[0].removeprefix("::ffff:"), address[1]))

    def _welcome(self, sock: socket.socket, address: str) -> None:
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            tls = self._context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        except OSError:
            sock.close()
            self._note_refusal(f"{address} hung up before it had proved itself")
            return
        deadline = time.monotonic() + HANDSHAKE_LIMIT_S
        applicant = _Applicant(sock=tls, address=address, deadline=deadline)
        self._applicants.append(applicant)
        self._selector.register(tls, selectors.EVENT_READ, applicant)

    def _hear(self, applicant: _Applicant) -> None:
        try:
            applicant.sock.do_handshake()
            channel = Channel(applicant.sock)
            channel.post_bytes(HELLO)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return  # the rest has not come
        except OSError as error:
            self._refuse(applicant, _what_it_did(error))
            return
        self._forget(applicant)
        self._on_connect(channel)

    def _refuse(self, applicant: _Applicant, why: str) -> None:
        self._forget(applicant)
        applicant.sock.close()
        self._note_refusal(f"{applicant.address} {why}")

    def _note_refusal(self, text: str) -> None:
        self._num_refused, self._refused = self._num_refused + 1, text

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


def _what_it_did(error: OSError) -> str:
    if getattr(error, "reason", None) in _NO_CERTIFICATE:
        return "does not have this sweep's certificate"
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
        return "does not speak TLS 1.3"
    return "hung up before it had proved itself"


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
