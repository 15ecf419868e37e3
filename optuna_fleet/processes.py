"""The fleet's processes: new ones or forks, none of which outlives the one that started it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NoReturn, TextIO

from optuna_fleet.exceptions import LaunchError

_PR_SET_PDEATHSIG = 1
_GRACE_S = 5.0
_STATES = {
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "D": "waiting for a disk or a device",
}
_HINTS: dict[int, str] = {
    signal.SIGKILL: " (killed by someone, or the machine ran out of memory)",
    signal.SIGSEGV: " (segmentation fault in native code)",
    signal.SIGABRT: " (native code aborted)",
    signal.SIGBUS: " (bus error: shared memory or a mapped file went away)",
}


def die_with(parent: int) -> None:
    """Have the kernel kill this process as soon as its parent, whose pid is given, is gone.

    More exactly, the parent's thread that started it: for children of single-threaded processes.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def dying_with_parent(*command: str) -> list[str]:
    """A command that the kernel kills when the thread that started it is gone."""
    return [*_running_with_parent("os.execv(sys.argv[1], sys.argv[1:])"), *command]


def _running_with_parent(code: str) -> list[str]:
    # First of all, so that it does not outlive its parent even if it is stopped before it begins.
    die_with = f"ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGKILL)})"
    if_orphan = f"os.getppid() == {os.getpid()} or os._exit(1)"
    return [sys.executable, "-c", f"import ctypes, os, sys; {die_with}; {if_orphan}; {code}"]


def clean_up_after_parent() -> None:
    """Have the kernel wake this process, instead of killing it, when its parent is gone.

    For one that notices by itself and has something to clean up; it may be stopped then.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def cause_of_death(exit_code: int) -> str:
    """Return how a process ended, in words; a negative code is a signal."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:  # a real-time signal
        name = str(-exit_code)
    return f"signal {name}{_HINTS.get(-exit_code, '')}"


def state_in_words(pid: int | None) -> str:
    """Return what keeps a process of this machine from running, or ""."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return _STATES.get(stat.rpartition(")")[2].split()[0], "")


def fill_standard_streams() -> None:
    """Open what is closed of standard input, output and error, on the null device.

    Or the next file or socket would take its number, and get what libraries and children print.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def outlet(stream: TextIO | None) -> int | None:
    """Return where a new process prints, for `subprocess.Popen`: where this one does, if it can.

    Args:
        stream: ``sys.__stdout__`` or ``sys.__stderr__``: None if it was closed from the start,
            when its number may be that of another file by now.
    """
    return subprocess.DEVNULL if stream is None or stream.closed else None


def flush_prints() -> None:
    """Flush this process' standard output and error, if they are open."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


class ModuleProcess:
    """``main()`` of one of this package's modules in a new process, in a session of its own.

    Ctrl-C is thus for the process that started it. It ends by itself when it has no more work,
    and is killed by the kernel with the process that started it, unless ``main`` calls
    `clean_up_after_parent`.

    Args:
        module: Name of the module.
        config: What ``main`` finds pickled on its standard input.
        environment: Variables beyond those of this process.
        pass_fds: Descriptors to inherit, under the same numbers.
    """

    def __init__(
        self,
        module: str,
        config: Any,
        *,
        environment: Mapping[str, str],
        pass_fds: Sequence[int] = (),
    ) -> None:
        self._pidfd = -1
        self._is_over = threading.Event()
        self._starter: threading.Thread | None = None
        self._process = self._started(module, environment, pass_fds)
        assert self._process.stdin is not None
        try:
            self._pidfd = _pidfd_of(self._process)
            # If it has ended at once, whoever waits for it will see how.
            with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
                stdin.write(pickle.dumps(config))
        except BaseException:
            self.kill()
            self._process.stdin.close()
            raise

    def _started(
        self, module: str, environment: Mapping[str, str], pass_fds: Sequence[int]
    ) -> subprocess.Popen[bytes]:
        root = str(Path(__file__).parents[1])
        code = f"sys.path.insert(0, {root!r}); from {module} import main; main()"
        process, self._starter = _started_on_lasting_thread(
            lambda: subprocess.Popen(
                _running_with_parent(code),
                stdin=subprocess.PIPE,
                stdout=outlet(sys.__stdout__),
                stderr=outlet(sys.__stderr__),
                start_new_session=True,
                env={**os.environ, **environment},
                pass_fds=pass_fds,
            ),
            self._is_over,
        )
        return process

    @property
    def pid(self) -> int:
        """Pid of the process."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Its exit code, a signal's number negated, or None while it runs."""
        return self._process.poll()

    def fileno(self) -> int:
        """File descriptor that becomes readable when the process ends."""
        return self._pidfd

    def is_alive(self) -> bool:
        """Whether the process still runs."""
        return self.exit_code is None

    def kill(self) -> None:
        """End it now, with all that it started in its session."""
        if self.is_alive():
            with contextlib.suppress(ProcessLookupError):  # another thread heard of its end
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._let_go()

    def close(self) -> None:
        """Wait a few seconds for it to end by itself, then kill it; may be called again."""
        try:
            self._process.wait(_GRACE_S)
        except BaseException as reason:
            self.kill()
            if not isinstance(reason, subprocess.TimeoutExpired):
                raise
        else:
            self._let_go()

    def _let_go(self) -> None:
        # Once only: the number may be that of another file by then.
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)
        self._is_over.set()
        if self._starter is not None:
            self._starter.join()


def _started_on_lasting_thread(
    start: Callable[[], subprocess.Popen[bytes]], is_over: threading.Event
) -> tuple[subprocess.Popen[bytes], threading.Thread]:
    """Start a process on a thread that lasts until it `is_over`; return both.

    The kernel takes the end of the thread that started a process for that of its parent.

    Raises:
        LaunchError: It can't be started.
    """
    started: Future[subprocess.Popen[bytes]] = Future()

    def run() -> None:
        try:
            started.set_result(start())
        except BaseException as error:
            started.set_exception(error)
        else:
            is_over.wait()

    thread = threading.Thread(target=run, name="optuna-fleet-starter", daemon=True)
    try:
        thread.start()
        return started.result(), thread
    except (OSError, RuntimeError) as error:  # the second: no thread
        raise _cannot_start(error) from error


def _pidfd_of(process: subprocess.Popen[bytes]) -> int:
    try:
        return os.pidfd_open(process.pid)
    except OSError as error:
        raise _cannot_start(error) from error


def _cannot_start(error: Exception) -> LaunchError:
    return LaunchError(
        f"A process of the fleet can't be started ({error}): allow more open files and "
        "processes (`ulimit -n`, `ulimit -u`, the limits of the container)."
    )


class Forks:
    """Forked children of a process that is one loop around a selector, and single-threaded.

    Args:
        selector: The loop's selector; what is registered has a callable as ``data``.
        on_exit: Called with (pid, exit code) of each child that was reaped.
        in_child: Called first in each child, to close what only the parent may have.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        *,
        on_exit: Callable[[int, int], None],
        in_child: Callable[[], None],
    ) -> None:
        self._selector = selector
        self._on_exit = on_exit
        self._in_child = in_child
        self._pidfds: dict[int, int] = {}
        # Whoever started this process may ignore it, which is inherited: nobody waits for a child
        # then, and its exit code is lost.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def spawn(self, main: Callable[[socket.socket], None]) -> tuple[int, socket.socket]:
        """Fork a child running `main` on one end of a socket pair; return its pid and our end.

        Raises:
            OSError: There are too many processes or open files; nothing is left behind.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        flush_prints()
        parent = os.getpid()
        with contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            with theirs:
                pid = os.fork()
                if pid == 0:
                    ours.close()
                    self._become_child(parent, main, theirs)
            undo.callback(_end_child, pid)
            self._pidfds[pid] = pidfd = os.pidfd_open(pid)
            undo.pop_all()
        self._selector.register(pidfd, selectors.EVENT_READ, lambda mask: self._reap(pid))
        return pid, ours

    def _become_child(
        self, parent: int, main: Callable[[socket.socket], None], sock: socket.socket
    ) -> NoReturn:
        # Whatever happens, this process must not run on into the parent's code.
        code = 1
        try:
            die_with(parent)
            self._in_child()
            main(sock)
            code = 0
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else int(left.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            flush_prints()
            os._exit(code)

    def _reap(self, pid: int) -> None:
        pidfd = self._pidfds.pop(pid)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        self._on_exit(pid, os.waitstatus_to_exitcode(status))

    def kill_all(self) -> None:
        """Kill the children and wait until they are gone."""
        for pid in self._pidfds:
            os.kill(pid, signal.SIGKILL)
        for pid in self._pidfds:
            os.waitpid(pid, 0)


def _end_child(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def preload(modules: Iterable[str]) -> None:
    """Import what children to be forked need, as far as it is installed."""
    gc.disable()  # nothing of it is garbage, and to look for some takes a fifth of the time
    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.enable()
    gc.collect()
    gc.freeze()  # so that the children's collectors leave the shared pages alone


def end_session() -> NoReturn:
    """End this process, a `ModuleProcess`, and with it whatever its children have started."""
    # Its modules were imported to be forked, not to be taken down in order.
    flush_prints()
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def run_loop(
    selector: selectors.BaseSelector,
    *,
    every_s: Callable[[], float | None] = lambda: None,
    tick: Callable[[], None] = lambda: None,
) -> NoReturn:
    """Handle the selector's events until one of their handlers raises.

    Args:
        selector: Waited on; what is registered has a callable as ``data``.
        every_s: Returns after how many seconds at most `tick` is called next; None for never.
        tick: Looks after what no event tells of.
    """
    while True:
        for key, mask in selector.select(every_s()):
            if key.fd in selector.get_map():  # not closed by an earlier one
                key.data(mask)
        tick()
