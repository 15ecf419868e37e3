"""Where agents and trainers knock: lets in who knows the sweep's secret, and nobody else.

One thread, however many strangers come. What a stranger gets of this process is a descriptor for
a while, and the few bytes of the handshake; there is no length for it to lie about.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from optuna_fleet.wire.channel import HANDSHAKE_LIMIT_S, HELLO, NONCE_BYTES, Channel, derived

_ANSWER_BYTES = len(HELLO) + NONCE_BYTES + 32
_BACKLOG = 1024
_MAX_APPLICANTS = 128
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
        host: Address to bind; loopback for a local cluster.
        secret: Shared secret of the sweep.
        on_connect: Called on a background thread with each authenticated channel.
        on_refusal: Called there with a sentence when strangers came; at most once a minute.
    """

    def __init__(
        self,
        host: str,
        secret: bytes,
        on_connect: Callable[[Channel], None],
        on_refusal: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._secret = secret
        self._on_connect = on_connect
        self._on_refusal = on_refusal
        self._closed = threading.Event()
        self._applicants: list[_Applicant] = []  # the oldest first
        self._num_refused = 0
        self._refused = ""
        self._quiet_until = 0.0
        self._socket = socket.create_server((host, 0), backlog=_BACKLOG)
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
            if self._num_refused and self._quiet_until <= now:
                self._report(now)
        for applicant in self._applicants:
            applicant.sock.close()
        self._selector.close()

    def _patience_s(self) -> float | None:
        times = [applicant.deadline for applicant in self._applicants[:1]]
        if self._num_refused:
            times.append(self._quiet_until)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _accept(self) -> None:
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
        applicant = _Applicant(
            sock=sock,
            address="{}:{}".format(*address),
            deadline=time.monotonic() + HANDSHAKE_LIMIT_S,
        )
        self._applicants.append(applicant)
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_READ, applicant)
        self._say(applicant, HELLO + applicant.nonce)

    def _hear(self, applicant: _Applicant) -> None:
        try:
            heard = applicant.sock.recv(_ANSWER_BYTES - len(applicant.answer))
        except OSError:
            heard = b""
        applicant.answer += heard
        if not heard:
            self._refuse(applicant, "hung up before it had proved itself")
        elif applicant.answer[: len(HELLO)] != HELLO[: len(applicant.answer)]:
            self._refuse(applicant, "does not speak this protocol")
        elif len(applicant.answer) == _ANSWER_BYTES:
            self._epoch_evaluator(applicant)

    def _epoch_evaluator(self, applicant: _Applicant) -> None:
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
