"""Who may read from a pipeline that serves processes it did not start: those of its user.

The server listens on a Unix socket in a folder that nobody else may enter. Readers unpickle what
comes from there, so they look whose process it is: the folder may be gone, and another user's be
there in its place. Where the owner is killed outright (SIGKILL), the folder stays: the name of a
socket that nobody serves, and nothing else.
"""

from __future__ import annotations

import os
import shutil
import socket
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

from optuna_fleet.exceptions import ProtocolError

_CREDENTIALS = struct.Struct("3i")
_LIMIT_S = 120
_FOREVER_S = 0
_BACKLOG = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a pipeline is served: a folder with a socket in it."""

    folder: str

    @classmethod
    def new(cls) -> Address:
        """Returns an address at which there is nobody yet."""
        return cls(folder=tempfile.mkdtemp(prefix="optuna-fleet-"))

    def forget(self) -> None:
        """Removes what there is of it; harmless if it is gone."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def listen(self) -> socket.socket:
        """Returns a listening socket."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._to(sock.bind)
        sock.listen(_BACKLOG)
        return sock

    def connect(self) -> socket.socket:
        """Returns a connection to the server.

        Raises:
            ProtocolError: It is another user's.
            FileNotFoundError: It is gone.
            ConnectionError: It was killed.
            BlockingIOError: It lets nobody in.
            OSError: This process can't have one more connection.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            # By the kernel: with Python's limits nobody waits behind many others.
            _limit(sock, _LIMIT_S)
            self._to(sock.connect)
            _limit(sock, _FOREVER_S)
            if peer_uid(sock) != os.geteuid():
                raise ProtocolError("The pipeline's socket is held by another user's process.")
        except BaseException:
            sock.close()
            raise
        return sock

    def _to(self, call: Callable[[str], object]) -> None:
        """Names of sockets are short, those of folders need not be."""
        folder = os.open(self.folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            call(f"/proc/self/fd/{folder}/socket")
        finally:
            os.close(folder)


def peer_uid(sock: socket.socket) -> int:
    """Returns the user of the process at the other end."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(data)[1])


def _limit(sock: socket.socket, seconds: int) -> None:
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))
