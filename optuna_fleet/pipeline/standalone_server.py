"""The server process of a pipeline that runs without an executor.

Like an agent, it imports what preprocessors need and forks them, and never uses torch itself. It
ends when its owner terminates it, and is killed with that one.
"""

from __future__ import annotations

import errno
import logging
import os
import pickle
import selectors
import signal
import socket
import struct
import sys
import time
from dataclasses import dataclass
from itertools import count

from optuna_fleet.pipeline.packed import PipelineSetup
from optuna_fleet.pipeline.server.server import PipelineServer
from optuna_fleet.processes import Forks, end_session, preload, run_loop

_LOOK_EVERY_S = 2.0
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """All that the server process needs to know to start; the listening socket is inherited.

    A preprocessor that works on one sample for `stuck_s` seconds is killed.
    """

    setup: PipelineSetup
    listener: int
    stuck_s: float
    sys_path: tuple[str, ...]
    preload: tuple[str, ...]


def peer_uid(sock: socket.socket) -> int:
    """Returns the user of the process at the other end."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(data)[1])


class _Server:
    def __init__(self, config: ServerConfig) -> None:
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(fileno=config.listener)
        self._listens_at_s: float | None = None
        self._numbers = count()
        self._forks = Forks(self._selector, on_exit=self._exited, in_child=self._in_child)
        self._stuck_s = config.stuck_s
        self._pipeline = PipelineServer(
            config.setup,
            spawn=self._forks.spawn,
            selector=self._selector,
            notify=logging.getLogger(__name__).warning,
        )

    def serve(self) -> None:
        """Serve until this process is terminated."""
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        try:
            # Nothing tells of a preprocessor that is stuck but the time that has passed.
            every_s = min(_LOOK_EVERY_S, self._stuck_s / 4)
            run_loop(self._selector, every_s=lambda: every_s, tick=self._look_after)
        except SystemExit:
            pass
        finally:
            self._forks.kill_all()

    def _look_after(self) -> None:
        self._pipeline.kill_stuck(self._stuck_s)
        self._pipeline.resume()
        if self._listens_at_s is not None and time.monotonic() >= self._listens_at_s:
            self._listens_at_s = None
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self, mask: int) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            # It went away again; or it stays, and so would this event.
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._selector.unregister(self._listener)
                self._listens_at_s = time.monotonic() + _LOOK_EVERY_S
            return
        if peer_uid(sock) == os.geteuid():
            self._pipeline.add_reader(next(self._numbers), sock)
        else:
            sock.close()

    def _exited(self, pid: int, exit_code: int) -> None:
        self._pipeline.child_died(pid)

    def _in_child(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._listener.close()


def main() -> None:
    """Run a server as configured by a pickled `ServerConfig` on standard input."""
    config: ServerConfig = pickle.loads(sys.stdin.buffer.read())  # from our parent, the owner
    sys.path[:] = config.sys_path
    server = _Server(config)
    preload(config.preload)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    server.serve()
    end_session()
