"""A process that has imported torch and Optuna, and forks the tests' workers, agents and solvers.

To start an agent afresh takes 5 seconds of CPU, a solver one, all but a moment of it for imports.
A forked one has another parent and no command line of its own; the rest is as if started afresh.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import importlib
import os
import pickle
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

import pytest

from optuna_fleet.executor.cluster import config
from optuna_fleet.executor.cluster.agent.entry import START
from optuna_fleet.executor.cluster.config import environment
from optuna_fleet.processes import ModuleProcess, flush_prints, preload
from tests.huge_pages import use_huge_pages

AGENT = "optuna_fleet.executor.cluster.agent.entry"
SERVER = "optuna_fleet.pipeline.standalone"
SOLVER = "optuna_fleet.alloc.isolation"
WORKER = "tests.workers"
FIRST = "OPTUNA_FLEET_TESTS_FIRST"
"""Environment variable: a script that agents, servers and solvers run first."""
TOLD = "OPTUNA_FLEET_TESTS_NURSERY"
"""Environment variable: where a nursery's orders come from, and what more it is to import."""

_ROOT = Path(__file__).parents[1]
_ENVIRONMENT = environment(1, {})  # heeded by what is imported
_AFRESH = ModuleProcess._started
_NUMBER = struct.Struct("!i")


class Nursery:
    """Forks what runs ``main()`` of a module; starts with the first process wanted of it.

    Args:
        orders: The way to a nursery that runs already.
    """

    def __init__(self, orders: socket.socket | None = None) -> None:
        self._orders = orders
        self._process: subprocess.Popen[bytes] | None = None

    @contextlib.contextmanager
    def bears_all(self) -> Iterator[None]:
        """Agents and solvers come from here."""

        def module_process(
            self_: Any, module: str, environment: Mapping[str, str], pass_fds: Sequence[int]
        ) -> Any:
            if module not in (AGENT, SERVER, SOLVER):
                return _AFRESH(self_, module, environment, pass_fds)
            return self.start_main(module, {**os.environ, **environment}, pass_fds=pass_fds)

        with _started_by(module_process):
            yield

    def run(
        self, script: str | Path, *arguments: str, folder: Path = _ROOT
    ) -> subprocess.CompletedProcess[str]:
        """As ``python SCRIPT ARGUMENTS``, whose agents and solvers come from here too.

        Args:
            script: A file, or the name of a module.
            folder: Where it is run.
        """
        files = tempfile.TemporaryFile
        with files() as out, files() as err:
            code = self.start([str(script), *arguments], os.environ, out, err, folder).wait(800)
            said = [os.pread(file.fileno(), 1 << 20, 0).decode() for file in (out, err)]
        return subprocess.CompletedProcess([str(script), *arguments], code, *said)

    def start(
        self,
        argv: list[str],
        environment: Mapping[str, str],
        out: IO[Any],
        err: IO[Any],
        folder: Path = _ROOT,
        *,
        inside: int | None = None,
    ) -> Forked:
        """As `run`, but not waited for; perhaps in the namespaces of the process `inside`."""
        with open(os.devnull) as nowhere:
            fds = (nowhere.fileno(), out.fileno(), err.fileno())
            return self._fork(argv[0], fds, environment, argv=argv, folder=folder, inside=inside)

    def close(self) -> None:
        """End it; what it forked ends by itself."""
        if self._orders is not None:
            self._orders.shutdown(socket.SHUT_RDWR)  # forks of this process may have it open
            self._orders.close()
        if self._process is not None:
            self._process.wait()

    def start_main(
        self,
        module: str,
        environment: Mapping[str, str] = os.environ,
        *,
        pass_fds: Sequence[int] = (),
        answers: bool = False,
    ) -> Forked:
        """``main()`` of a module, with a pipe to it, and perhaps one from it."""
        theirs, stdin = os.pipe()
        stdout, their_stdout = os.pipe() if answers else (None, os.dup(1))
        streams = (theirs, their_stdout, 2)
        forked = self._fork(module, streams, environment, pass_fds=pass_fds)
        os.close(theirs)
        os.close(their_stdout)
        forked.stdin = os.fdopen(stdin, "wb")
        forked.stdout = None if stdout is None else os.fdopen(stdout, "rb")
        return forked

    def _fork(
        self,
        module: str,
        streams: tuple[int, int, int],
        environment: Mapping[str, str],
        *,
        argv: list[str] | None = None,
        folder: Path | None = None,
        pass_fds: Sequence[int] = (),
        inside: int | None = None,
    ) -> Forked:
        order = Order(
            module=module,
            argv=argv,
            environment=dict(environment),
            folder=str(folder or os.getcwd()),
            sys_path=sys.path,
            parent=os.getpid(),
            numbers=(0, 1, 2, *pass_fds),
            inside=inside,
        )
        status, their_status = socket.socketpair()
        with their_status:
            fds = [*streams, *pass_fds, their_status.fileno()]
            socket.send_fds(self._way(), [pickle.dumps(order)], fds)
        return Forked(status)

    @contextlib.contextmanager
    def branch(self, *modules: str) -> Iterator[Nursery]:
        """Another nursery, forked from this one, that has imported these as well."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, open(os.devnull) as nowhere:
            told = {TOLD: " ".join([str(theirs.fileno()), *modules])}
            environment = {**os.environ, **_ENVIRONMENT, **told}
            fds, given = (nowhere.fileno(), 1, 2), (theirs.fileno(),)
            forked = self._fork("tests.nursery", fds, environment, pass_fds=given)
        branch = Nursery(ours)
        try:
            yield branch
        finally:
            branch.close()
            forked.wait()

    def begin(self) -> None:
        """Start the process that forks the others, which the first of them does otherwise."""
        self._way()

    def _way(self) -> socket.socket:
        if self._orders is None:
            self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                told = {TOLD: str(theirs.fileno()), "PYTHONPATH": str(_ROOT)}
                self._process = subprocess.Popen(
                    [sys.executable, "-c", "from tests.nursery import main; main()"],
                    cwd=_ROOT,
                    env={**os.environ, **_ENVIRONMENT, **told},
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    pass_fds=(theirs.fileno(),),
                )
        return self._orders


@contextlib.contextmanager
def processes_start_afresh() -> Iterator[None]:
    """As for users: for tests that look at what surrounds an agent, a server or a solver."""
    with _started_by(_AFRESH):
        yield


@contextlib.contextmanager
def preloading(*modules: str) -> Iterator[None]:
    """Agents that join import these once for their trainers, and nothing else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "modules_to_preload", lambda: modules)
        yield


@contextlib.contextmanager
def _started_by(method: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModuleProcess, "_started", method)
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What is to be forked.

    Attributes:
        module: Its name; of a script perhaps that of its file.
        argv: Of a script, which is run as ``__main__``; of other modules ``main()`` is called.
        parent: Who would be its parent, were it not forked.
        numbers: Those that the descriptors sent along are to have there.
        inside: A process in whose namespaces it is to be; None: in those of the nursery.
    """

    module: str
    argv: list[str] | None
    environment: dict[str, str]
    folder: str
    sys_path: list[str]
    parent: int
    numbers: tuple[int, ...]
    inside: int | None


class Forked:
    """What is used of `subprocess.Popen`."""

    def __init__(self, status: socket.socket) -> None:
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        self.returncode: int | None = None
        self._lock = threading.Lock()
        self._status = status
        self.pid = self._read()

    def fileno(self) -> int:
        """Of what is readable once it has ended, until that was heard."""
        return self._status.fileno()

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._lock.acquire(timeout=-1 if timeout is None else timeout):
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        try:  # any thread may ask
            if self.returncode is None:
                self.returncode = self._end(timeout)
            return self.returncode
        finally:
            self._lock.release()

    def _end(self, timeout: float | None) -> int:
        self._status.settimeout(timeout)
        try:
            code = self._read()
        except (BlockingIOError, TimeoutError):
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0) from None
        self._status.shutdown(socket.SHUT_WR)  # only now may its pid become another's
        self._status.settimeout(None)
        self._status.recv(1)  # the end: it is reaped
        self._status.close()
        return code

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # its end is not known here yet
                os.kill(self.pid, number)

    def _read(self) -> int:
        return int(_NUMBER.unpack(self._status.recv(_NUMBER.size))[0])


# -- in the nursery -------------------------------------------------------------------------------


def main() -> NoReturn:
    """Fork what is ordered until the tests end."""
    orders_fd, *more = os.environ.pop(TOLD).split()
    # Agents are told to import torchvision, as collected tests have.
    torchvision = ("torchvision.models", "torchvision.transforms.v2")
    preload((AGENT, SERVER, SOLVER, "mip", *torchvision, *config.modules_to_preload(), *more))
    use_huge_pages()
    nest = Nest()
    nest.listen(socket.socket(fileno=int(orders_fd)))
    while True:
        for key, _ in nest.selector.select():
            key.data()


class Nest:
    """The processes that were forked, and the ways on which orders come."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self._ways: list[socket.socket] = []
        self._children: dict[int, socket.socket] = {}  # who waits for their ends, by pidfd

    def listen(self, way: socket.socket) -> None:
        self._ways.append(way)
        self.selector.register(way, selectors.EVENT_READ, lambda: self._take_order(way))

    def _take_order(self, way: socket.socket) -> None:
        order, fds, _, _ = socket.recv_fds(way, 1 << 20, 16)
        if order:
            self._fork(pickle.loads(order), fds)
        elif way is self._ways[0]:
            os._exit(0)
        else:
            self.selector.unregister(way)
            self._ways.remove(way)
            way.close()

    def _fork(self, order: Order, fds: list[int]) -> None:
        *fds, status_fd = fds
        status = socket.socket(fileno=status_fd)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            ours.close()
            self._close_inherited()
            _become(order, fds, status, theirs)
        theirs.close()
        for fd in fds:
            os.close(fd)
        self.listen(ours)
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = status
        self.selector.register(pidfd, selectors.EVENT_READ, lambda: self._tell_end(pidfd, pid))

    def _close_inherited(self) -> None:
        self.selector.close()
        for sock in (*self._ways, *self._children.values()):
            sock.close()
        for pidfd in self._children:
            os.close(pidfd)

    def _tell_end(self, pidfd: int, pid: int) -> None:
        self.selector.unregister(pidfd)
        end = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
        assert end is not None
        status = self._children[pidfd]
        code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        with contextlib.suppress(BrokenPipeError):
            status.send(_NUMBER.pack(code))
        self.selector.register(status, selectors.EVENT_READ, lambda: self._reap(pidfd, pid))

    def _reap(self, pidfd: int, pid: int) -> None:
        """Its end has been heard of: before, its pid was not to become another's."""
        status = self._children.pop(pidfd)
        self.selector.unregister(status)
        os.close(pidfd)
        os.waitpid(pid, 0)
        status.close()


def _become(order: Order, fds: list[int], status: socket.socket, way: socket.socket) -> NoReturn:
    code = 1
    try:
        os.setsid()
        with status:
            status.send(_NUMBER.pack(os.getpid()))
        if order.argv is None and order.module != WORKER:
            way.close()
        if order.inside is not None:
            _enter(order.inside)
        _take(order, fds)
        _run(order, way)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        print(end.code or "", file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        flush_prints()
        os._exit(code)


def _enter(pid: int) -> None:
    """Go on in the namespaces of that process, in a child: this process only waits for it."""
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("net", "uts", "pid", "mnt"):
        with open(f"/proc/{pid}/ns/{kind}") as namespace:
            if libc.setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"setns: {kind}")
    if child := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(code if code >= 0 else 128 - code)
    libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _take(order: Order, fds: list[int]) -> None:
    """Put on what a process gets from the one that starts it."""
    kept = [fcntl.fcntl(fd, fcntl.F_DUPFD, 500) for fd in fds]  # out of the way
    for fd in fds:
        os.close(fd)
    for number, fd in zip(order.numbers, kept, strict=True):
        os.dup2(fd, number)
    for fd in kept:
        os.close(fd)
    sys.path[:] = order.sys_path
    os.chdir(order.folder)
    os.environ.clear()
    os.environ.update(order.environment)
    tempfile.tempdir = None  # by the environment


def _run(order: Order, way: socket.socket) -> None:
    if order.argv is not None:
        sys.argv[:] = order.argv
        # A command of ours that would begin anew has all that it would import here.
        os.execve = _become_agent
        with Nursery(way).bears_all():
            if order.module.endswith(".py"):
                runpy.run_path(order.module, run_name="__main__")
            else:
                runpy.run_module(order.module, run_name="__main__", alter_sys=True)
            atexit._run_exitfuncs()
        return
    if order.module == WORKER:
        importlib.import_module(WORKER).main(Nursery(way))
        atexit._run_exitfuncs()
        return
    if first := order.environment.get(FIRST):
        runpy.run_path(first)
    me, getppid = os.getpid(), os.getppid
    os.getppid = lambda: order.parent if os.getpid() == me else getppid()
    importlib.import_module(order.module).main()


def _become_agent(path: str, argv: list[str], environment: Mapping[str, str]) -> NoReturn:
    """In the place of `os.execve`, which only the command ``optuna-fleet agent`` calls."""
    assert argv[1:] == ["-c", START]
    os.environ.clear()
    os.environ.update(environment)
    importlib.import_module(AGENT).main()
    os._exit(0)
