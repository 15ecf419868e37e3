"""The server process of a pipeline that runs without an executor.

Like an agent, it imports what preprocessors need and forks them, never uses torch itself, and ends
with its owner: when the owner says so, or is no more.
"""

from __future__ import annotations

import errno
import logging
import os
import pickle
import selectors
import socket
import sys
import time
from itertools import count

from optuna_fleet.pipeline.server.server import PipelineServer
from optuna_fleet.pipeline.standalone.handle import ServerConfig
from optuna_fleet.processes import Forks, end_session, preload, run_loop

_LOOK_EVERY_S = 2.0


class _Server:
    def __init__(self, config: ServerConfig) -> None:
        self._address = config.address
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(fileno=config.listener)
        self._lifeline = socket.socket(fileno=config.lifeline)
        self._owner = os.pidfd_open(config.owner_pid)
        self._listens_at_s: float | None = None
        self._numbers = count()
        self._forks = Forks(
            self._selector,
            on_exit=self._exited,
            in_child=self._close_inherited,
        )
        self._stuck_s = config.stuck_s
        self._pipeline = PipelineServer(
            config.setup,
            spawn=self._forks.spawn,
            selector=self._selector,
            notify=logging.getLogger(__name__).warning,
        )

    def serve(self) -> None:
        """Serve until the owner ends."""
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._lifeline, selectors.EVENT_READ, _end)
        self._selector.register(self._owner, selectors.EVENT_READ, _end)
        try:
            # Nothing tells of a preprocessor that is stuck but the time that has passed.
            every_s = min(_LOOK_EVERY_S, self._stuck_s / 4)
            run_loop(self._selector, every_s=lambda: every_s, tick=self._look_after)
        except EOFError:
            pass
        finally:
            self._forks.kill_all()
            self._address.forget()  # the owner may have been killed

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
        self._pipeline.add_reader(next(self._numbers), sock)

    def _exited(self, pid: int, exit_code: int) -> None:
        self._pipeline.child_died(pid)

    def _close_inherited(self) -> None:
        os.close(self._owner)
        for sock in (self._listener, self._lifeline):
            sock.close()


def _end(mask: int) -> None:
    raise EOFError


def main() -> None:
    """Run a server as configured by a pickled `ServerConfig` on standard input."""
    config: ServerConfig = pickle.loads(sys.stdin.buffer.read())  # from our parent, the owner
    if os.getppid() != config.owner_pid:  # it was killed meanwhile
        config.address.forget()
        return
    sys.path[:] = config.sys_path
    server = _Server(config)
    preload(config.preload)
    server.serve()
    end_session()
