"""Packets over Unix socket pairs; the agent's side never blocks, and no peer can harm another."""

from __future__ import annotations

import logging
import pickle
import selectors
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence

from optuna_fleet.exceptions import ProtocolError

MAX_PACKET = 160 << 10
"""Largest packet, below the kernel's default socket buffer (208 KiB)."""

_CONTROL_BYTES = socket.CMSG_SPACE(struct.calcsize("i"))

_MOST_AT_ONCE = 64
"""Messages of one peer, before the others have their turn."""

_logger = logging.getLogger(__name__)


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Returns two connected sockets that keep message boundaries; one is for a child to come."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def encode(message: object) -> bytes:
    """Returns the packet of a message."""
    packet = pickle.dumps(message, protocol=5)
    if len(packet) > MAX_PACKET:
        raise ProtocolError(
            f"A {type(message).__name__} of {len(packet)} bytes is larger than a packet may be "
            f"({MAX_PACKET} bytes)."
        )
    return packet


def _decode(packet: bytes) -> object:
    if not packet:
        raise EOFError
    return pickle.loads(packet)


def send(sock: socket.socket, message: object) -> None:
    """Sends one message."""
    sock.sendall(encode(message))


def receive(sock: socket.socket, flags: int = 0) -> object:
    """Returns the next message.

    Raises:
        EOFError: The other side is gone.
        BlockingIOError: Nothing is there, and the socket or the flags say not to wait.
    """
    try:
        return _decode(sock.recv(MAX_PACKET, flags))
    except ConnectionResetError:
        raise EOFError from None


def peek_first(sock: socket.socket) -> tuple[object, list[int]]:
    """Returns the first message, and the descriptors with it, which the caller must close.

    It stays the first: `receive` takes it away.

    Raises:
        EOFError: The other side is gone.
    """
    # Not socket.recv_fds, which ignores its flags (seen in Python 3.11).
    flags = int(socket.MSG_CMSG_CLOEXEC | socket.MSG_PEEK)
    try:
        packet, control, _, _ = sock.recvmsg(MAX_PACKET, _CONTROL_BYTES, flags)
    except ConnectionResetError:
        raise EOFError from None
    found = [data for level, kind, data in control if kind == socket.SCM_RIGHTS]
    return _decode(packet), [fd for data in found for (fd,) in struct.iter_unpack("i", data)]


def close_ports_in_child(selector: selectors.BaseSelector) -> None:
    """Closes a forked child's copies of the ports; the selector itself is shared: leave it.

    The child could write what others read, and would hide the death of its siblings.
    """
    for key in selector.get_map().values():
        if isinstance(key.data, Port):
            key.data.sock.close()


class Port:
    """The agent's end of one socket: delivers messages, queues those the peer is too slow for.

    It registers itself with the selector; the registered ``data`` is the port, to be called
    with the event mask. A stopped peer costs a queue, not the agent's time. What goes wrong with
    its messages costs the connection, not the agent: nothing is heard of the peer from then on,
    and it reads an end of stream; but only when it is gone, ``on_close`` is called, once.

    The port owns the socket from now on.
    """

    def __init__(
        self,
        sock: socket.socket,
        selector: selectors.BaseSelector,
        *,
        on_message: Callable[[object], None],
        on_close: Callable[[], None],
    ) -> None:
        self.sock = sock
        self._selector = selector
        self._on_message = on_message
        self._on_close = on_close
        self._queue: deque[tuple[bytes, Sequence[int]]] = deque()
        self._is_open = True
        self._is_broken = False
        self._events = selectors.EVENT_READ
        sock.setblocking(False)
        selector.register(sock, selectors.EVENT_READ, self)

    def __call__(self, mask: int) -> None:
        """Handles the events the selector reported."""
        if mask & selectors.EVENT_WRITE:
            self._flush()
        if mask & selectors.EVENT_READ:
            for _ in range(_MOST_AT_ONCE):
                if not (self._is_open and self._hear()):
                    break

    def send(self, message: object, descriptors: Sequence[int] = ()) -> None:
        """Sends now or as soon as the peer reads; descriptors must stay open until then."""
        if self._is_open and not self._is_broken:
            self._queue.append((encode(message), descriptors))
            if len(self._queue) == 1:
                self._flush()

    def drain(self) -> None:
        """Delivers everything that has arrived."""
        while self._is_open and self._hear():
            pass

    def close(self) -> None:
        """Unregisters and closes the socket; what was queued is dropped."""
        if self._is_open:
            self._is_open = False
            self._selector.unregister(self.sock)
            self.sock.close()
            self._queue.clear()

    def _hear(self) -> bool:
        """Delivers one message, if one is there; the selector tells of the next."""
        try:
            packet = self.sock.recv(MAX_PACKET)
        except BlockingIOError:
            return False
        except OSError:
            packet = b""
        try:
            if not packet:
                self.close()
                self._on_close()
            elif not self._is_broken:
                self._on_message(_decode(packet))
        except Exception:
            self._break(f"{self._on_message.__qualname__} failed")
        return True

    def _flush(self) -> None:
        while self._is_open and self._queue:
            packet, descriptors = self._queue[0]
            try:
                if descriptors:
                    socket.send_fds(self.sock, [packet], descriptors)
                else:
                    self.sock.send(packet)
            except BlockingIOError:
                break
            except (BrokenPipeError, ConnectionResetError):
                # What the peer said before it died is still to be read; its end of stream then
                # reports the death.
                self._queue.clear()
                break
            except OSError:
                self._break("it can't be written to")
                break
            self._queue.popleft()
        write = selectors.EVENT_WRITE if self._queue else 0
        if self._is_open and self._events != selectors.EVENT_READ | write:
            self._events = selectors.EVENT_READ | write
            self._selector.modify(self.sock, self._events, self)

    def _break(self, why: str) -> None:
        _logger.exception("A connection of the pipeline is given up: %s.", why)
        self._queue.clear()
        self._is_broken = True
        if self._is_open:
            try:
                self.sock.shutdown(socket.SHUT_WR)
            except OSError:
                return  # it is gone: its end of stream is read next
