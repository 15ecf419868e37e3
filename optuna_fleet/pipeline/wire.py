"""Packets over Unix socket pairs, with file descriptors; the agent's side never blocks."""

from __future__ import annotations

import errno
import logging
import os
import pickle
import selectors
import socket
import struct
from collections import deque
from collections.abc import Callable

from optuna_fleet.exceptions import ProtocolError

MAX_PACKET = 160 << 10
"""Largest packet, below the kernel's default socket buffer (208 KiB)."""

_FD = struct.Struct("i")
_CONTROL_BYTES = socket.CMSG_LEN(_FD.size)
_CLOSED_ON_EXEC = int(socket.MSG_CMSG_CLOEXEC)  # operations of enums take microseconds


_SHORT = {errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM, errno.EMFILE, errno.ENFILE}
"""Errors of sending that may be over when others have read what was sent to them."""

_logger = logging.getLogger(__name__)


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Returns two connected sockets that keep message boundaries; one is for a child to come."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def encode(message: object) -> bytes:
    """Returns the packet of a message."""
    packet = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    if len(packet) > MAX_PACKET:
        raise ProtocolError(
            f"A {type(message).__name__} of {len(packet)} bytes is larger than a packet may be "
            f"({MAX_PACKET} bytes)."
        )
    return packet


def send(sock: socket.socket, message: object, fd: int | None = None) -> None:
    """Sends one message and perhaps a file descriptor, of which the caller keeps its own copy."""
    socket.send_fds(sock, [encode(message)], [] if fd is None else [fd])


def receive(sock: socket.socket, flags: int = 0) -> tuple[object, int | None]:
    """Returns the next message and the descriptor that came with it, which the caller must close.

    Raises:
        EOFError: The other side is gone.
        BlockingIOError: Nothing is there, and the socket or the flags say not to wait.
    """
    try:
        # Not socket.recv_fds, which ignores its flags (seen in Python 3.11).
        packet, control, _, _ = sock.recvmsg(MAX_PACKET, _CONTROL_BYTES, flags | _CLOSED_ON_EXEC)
    except ConnectionResetError:
        raise EOFError from None
    if not packet:
        raise EOFError
    fds = [
        _FD.unpack_from(data)[0]
        for level, kind, data in control
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
    ]
    return pickle.loads(packet), (fds[0] if fds else None)


class Port:
    """The agent's end of one socket: delivers messages, queues those the peer is too slow for.

    It registers itself with the selector; the registered ``data`` is the port, to be called
    with the event mask. A stopped peer costs a queue, not the agent's time; what goes wrong with
    its messages costs the connection, not the agent.

    Args:
        sock: Our end of a ``socket_pair``; the port owns it from now on.
        selector: The agent's selector.
        on_message: Called with (message, descriptor or None); owns the descriptor.
        on_close: Called once when the peer is gone; not called by ``close``.
    """

    def __init__(
        self,
        sock: socket.socket,
        selector: selectors.BaseSelector,
        *,
        on_message: Callable[[object, int | None], None],
        on_close: Callable[[], None],
    ) -> None:
        self._sock = sock
        self._selector = selector
        self._on_message = on_message
        self._on_close = on_close
        self._queue: deque[tuple[bytes, int | None]] = deque()
        self._open = True
        self._is_held_up = False
        sock.setblocking(False)
        selector.register(sock, selectors.EVENT_READ, self)

    def __call__(self, mask: int) -> None:
        """Handles the events the selector reported."""
        if mask & selectors.EVENT_WRITE:
            self._flush()
        if mask & selectors.EVENT_READ:
            self.drain()

    def send(self, message: object, fd: int | None = None) -> None:
        """Sends now or as soon as the peer reads; ``fd`` must stay open until the peer had it."""
        if not self._open:
            return
        self._queue.append((encode(message), fd))
        if len(self._queue) == 1:
            self._flush()

    def drain(self) -> None:
        """Delivers everything that has arrived."""
        while self._open:
            try:
                message, fd = receive(self._sock)
            except BlockingIOError:
                return
            except EOFError:
                self._lost()
                return
            try:
                self._on_message(message, fd)
            except (ConnectionError, EOFError):
                raise  # the agent's own connection to its driver
            except Exception:
                name = type(message).__name__
                _logger.exception("A connection of the pipeline is closed: %s failed.", name)
                self._lost()

    def resume(self) -> None:
        """Tries again to send what could not be sent for want of memory or descriptors."""
        if self._is_held_up:
            self._flush()

    def close(self) -> None:
        """Unregisters and closes the socket; what was queued is dropped."""
        if self._open:
            self._open = False
            self._selector.unregister(self._sock)
            self._sock.close()
            self._queue.clear()

    def close_in_child(self) -> None:
        """Closes a forked child's copy of the socket; the selector is shared: leave it."""
        os.close(self._sock.detach())

    def _flush(self) -> None:
        self._is_held_up = False
        while self._open and self._queue:
            packet, fd = self._queue[0]
            try:
                socket.send_fds(self._sock, [packet], [] if fd is None else [fd])
            except BlockingIOError:
                break
            except (BrokenPipeError, ConnectionResetError):
                # What the peer said before it died is still to be read; its end of stream then
                # reports the death.
                self._queue.clear()
                break
            except OSError as error:
                if error.errno in _SHORT:
                    self._is_held_up = True
                    break
                _logger.exception("A connection of the pipeline is closed.")
                self._queue.clear()
                self._sock.shutdown(socket.SHUT_RDWR)  # its end is read soon
                break
            self._queue.popleft()
        if self._open:
            # The socket may be ready all the time that something else is short.
            write = selectors.EVENT_WRITE if self._queue and not self._is_held_up else 0
            self._selector.modify(self._sock, selectors.EVENT_READ | write, self)

    def _lost(self) -> None:
        self.close()
        self._on_close()
