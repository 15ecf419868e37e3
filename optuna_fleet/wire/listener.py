"""Where agents and trainers knock.

Whoever has the sweep's certificate gets in, and nobody else, however many strangers come. What a
stranger gets of this process is a descriptor for a while, and the memory of a handshake, for
which OpenSSL has a limit.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.wire.channel import HANDSHAKE_LIMIT_S, HELLO, Channel
from optuna_fleet.wire.inbox import Inbox
from optuna_fleet.wire.invitation import join_address, tls_context

_BACKLOG = 1024
_MAX_APPLICANTS = 128
_AT_ONCE = 32
_TURN_S = 0.5  # no applicant makes room for another one before this
_QUIET_S = 60.0
_RETRY_S = 0.1
_NO_CERTIFICATE = ("CERTIFICATE_VERIFY_FAILED", "PEER_DID_NOT_RETURN_A_CERTIFICATE")


@dataclass(slots=True, eq=False)
class _Applicant:
    sock: ssl.SSLSocket
    address: str
    since: float


class Listener:
    """Accepts authenticated connections, in the turns of an inbox.

    Args:
        host: Address to bind; None for all.
        on_connect: Called with each authenticated channel.
        on_refusal: Called with a sentence when strangers came; at most once a minute.

    Raises:
        FleetConfigError: The address can't be bound.
    """

    def __init__(
        self,
        inbox: Inbox,
        host: str | None,
        credentials: bytes,
        on_connect: Callable[[Channel], None],
        on_refusal: Callable[[str], None] = lambda text: None,
        *,
        port: int = 0,
    ) -> None:
        self._inbox = inbox
        self._context = tls_context(credentials, is_server=True)
        self._on_connect = on_connect
        self._on_refusal = on_refusal
        self._applicants: list[_Applicant] = []  # the oldest first
        self._num_refused = 0
        self._refused = ""
        self._is_quiet = self._looks_for_late = False
        self._socket = _bound(host, port)
        self._socket.setblocking(False)
        self.host, self.port = self._socket.getsockname()[:2]
        inbox.call_later(0.0, self._resume)

    def close(self) -> None:
        """Accept no more connections, when the inbox is closed."""
        for applicant in self._applicants:
            applicant.sock.close()
        self._socket.close()

    # -- in a turn --------------------------------------------------------------------------------

    def _pause(self, seconds: float) -> None:
        """Accept nobody for a while; who comes waits in the kernel's queue."""
        self._inbox.unwatch(self._socket.fileno())
        self._inbox.call_later(seconds, self._resume)

    def _resume(self) -> None:
        self._inbox.watch(self._socket.fileno(), select.EPOLLIN, self._accept)

    def _accept(self, events: int) -> None:
        for _ in range(_AT_ONCE):
            if not self._has_accepted():
                break

    def _has_accepted(self) -> bool:
        if len(self._applicants) >= _MAX_APPLICANTS:
            left_s = self._applicants[0].since + _TURN_S - time.monotonic()
            if left_s > 0:  # all have come just now, as when a large fleet starts
                self._pause(left_s)
                return False
        try:
            sock, address = self._socket.accept()
        except BlockingIOError:
            return False
        except OSError:  # out of file descriptors, which may pass
            if self._applicants:
                self._refuse(self._applicants[0], "was in the way: too many files are open")
            self._pause(_RETRY_S)
            return False
        if len(self._applicants) >= _MAX_APPLICANTS:
            self._refuse(self._applicants[0], "was one of too many at once")
        self._welcome(sock, join_address(address[0].removeprefix("::ffff:"), address[1]))
        return True

    def _welcome(self, sock: socket.socket, address: str) -> None:
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            tls = self._context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        except OSError:
            sock.close()
            self._note_refusal(f"{address} hung up before it had proved itself")
            return
        applicant = _Applicant(sock=tls, address=address, since=time.monotonic())
        self._applicants.append(applicant)
        if not self._looks_for_late:
            self._refuse_late()
        self._inbox.watch(tls.fileno(), select.EPOLLIN, partial(self._hear, applicant))
        self._hear(applicant)  # its first words may be there

    def _refuse_late(self) -> None:
        """Again and again, as long as there are applicants: one timer serves all of them."""
        now = time.monotonic()
        while self._applicants and self._applicants[0].since + HANDSHAKE_LIMIT_S <= now:
            self._refuse(self._applicants[0], "did not prove itself in time")
        self._looks_for_late = bool(self._applicants)
        if self._looks_for_late:
            left_s = self._applicants[0].since + HANDSHAKE_LIMIT_S - now
            self._inbox.call_later(left_s, self._refuse_late)

    def _hear(self, applicant: _Applicant, events: int = 0) -> None:
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
        if not self._is_quiet:
            self._report()

    def _forget(self, applicant: _Applicant) -> None:
        self._applicants.remove(applicant)
        self._inbox.unwatch(applicant.sock.fileno())
        self._resume()  # there is a place again

    def _report(self) -> None:
        self._is_quiet = self._num_refused > 0
        if not self._is_quiet:
            return
        others = f", and {self._num_refused - 1} before it" if self._num_refused > 1 else ""
        self._num_refused = 0
        self._inbox.call_later(_QUIET_S, self._report)
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
