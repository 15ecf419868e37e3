"""A process that has imported torch and Optuna, and forks the agents and solvers of the tests.

To start an agent afresh takes 5 seconds of CPU, a solver one, all but a moment of it for imports.
A forked one has another parent and no command line of its own; the rest is as if started afresh.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import selectors
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NoReturn

import pytest

from optuna_fleet.alloc import IsolatedAllocator
from optuna_fleet.executor.cluster.local import AgentProcess
from optuna_fleet.executor.runtime import _modules_to_preload
from optuna_fleet.processes import ModuleProcess, preload

AGENT = "optuna_fleet.executor.cluster.agent"
SOLVER = "optuna_fleet.alloc.solver_process"

_ROOT = Path(__file__).parents[1]
_NUMBER = struct.Struct("!i")


@contextlib.contextmanager
def processes_are_forked() -> Iterator[None]:
    """Agents and solvers come from a nursery."""
    nursery = Nursery()

    def agent(self: Any, module: str, environment: Mapping[str, str], pass_fds: Any) -> Any:
        if module != AGENT:
            return ModuleProcess._started(self, module, environment, pass_fds)
        return nursery.start(AGENT, {**os.environ, **environment})

    def solver(self: Any) -> Any:
        return nursery.start(SOLVER, dict(os.environ), has_answers=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AgentProcess, "_started", agent)
        patch.setattr(IsolatedAllocator, "_started", solver)
        yield
    nursery.close()


@contextlib.contextmanager
def processes_start_afresh(started: Any = IsolatedAllocator._started) -> Iterator[None]:
    """As for users: for tests that look at what surrounds an agent or a solver."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AgentProcess, "_started", ModuleProcess._started)
        patch.setattr(IsolatedAllocator, "_started", started)
        yield


class Nursery:
    """Starts with the first process wanted of it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(
        self, module: str, environment: Mapping[str, str], *, has_answers: bool = False
    ) -> Forked:
        """Fork a process that runs ``main()`` of a module."""
        if self._process is None:
            self._open(environment)
        theirs, stdin = os.pipe()
        stdout, their_stdout = os.pipe() if has_answers else (None, os.dup(1))
        status, their_status = socket.socketpair()
        fds = [theirs, their_stdout, 2, their_status.fileno()]
        order = pickle.dumps((module, environment, os.getcwd(), sys.path))
        with their_status:
            socket.send_fds(self._orders, [order], fds)
        os.close(theirs)
        os.close(their_stdout)
        return Forked(
            os.fdopen(stdin, "wb"), None if stdout is None else os.fdopen(stdout, "rb"), status
        )

    def close(self) -> None:
        """End it; what it forked ends by itself."""
        if self._process is not None:
            self._orders.close()
            self._process.wait()

    def _open(self, environment: Mapping[str, str]) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = f"from tests.nursery import main; main({theirs.fileno()})"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                cwd=_ROOT,
                env={**environment, "PYTHONPATH": str(_ROOT)},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(theirs.fileno(),),
            )


class Forked:
    """What is used of `subprocess.Popen`."""

    def __init__(self, stdin: IO[bytes], stdout: IO[bytes] | None, status: socket.socket) -> None:
        self.stdin = stdin
        self.stdout = stdout
        self.returncode: int | None = None
        self._status = status
        self.pid = self._read()

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._status.settimeout(timeout)
            try:
                self.returncode = self._read()
            except (BlockingIOError, TimeoutError):
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0) from None
            self._status.close()  # only now may its pid become another's
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _read(self) -> int:
        return int(_NUMBER.unpack(self._status.recv(_NUMBER.size))[0])


# -- in the nursery -------------------------------------------------------------------------------


def main(orders_fd: int) -> NoReturn:
    """Fork what is ordered until the tests end."""
    preload((AGENT, SOLVER, "mip", *_modules_to_preload()))
    selector = selectors.DefaultSelector()
    orders = socket.socket(fileno=orders_fd)
    children: dict[int, socket.socket] = {}

    def fork() -> None:
        order, fds, _, _ = socket.recv_fds(orders, 1 << 20, 4)
        if not order:
            os._exit(0)
        status = socket.socket(fileno=fds.pop())
        pid = os.fork()
        if pid == 0:
            for inherited in (orders, selector, *children.values()):
                inherited.close()
            for pidfd in children:
                os.close(pidfd)
            _become(order, fds, status)
        for fd in fds:
            os.close(fd)
        pidfd = os.pidfd_open(pid)
        children[pidfd] = status
        selector.register(pidfd, selectors.EVENT_READ, lambda: tell_end(pidfd, pid))

    def tell_end(pidfd: int, pid: int) -> None:
        selector.unregister(pidfd)
        end = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
        assert end is not None
        code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        status = children[pidfd]
        with contextlib.suppress(BrokenPipeError):
            status.send(_NUMBER.pack(code))
        selector.register(status, selectors.EVENT_READ, lambda: reap(pidfd, pid))

    def reap(pidfd: int, pid: int) -> None:
        """Its end has been heard of: before, its pid was not to become another's."""
        status = children.pop(pidfd)
        selector.unregister(status)
        status.close()
        os.close(pidfd)
        os.waitpid(pid, 0)

    selector.register(orders, selectors.EVENT_READ, fork)
    while True:
        for key, _ in selector.select():
            key.data()


def _become(order: bytes, fds: list[int], status: socket.socket) -> NoReturn:
    code = 1
    try:
        os.setsid()
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
            os.close(fd)
        with status:
            status.send(_NUMBER.pack(os.getpid()))
        module, environment, folder, sys.path[:] = pickle.loads(order)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        importlib.import_module(module).main()
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        os._exit(code)
