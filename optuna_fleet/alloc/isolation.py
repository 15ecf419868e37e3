"""Runs an allocator where its death, its hanging or its failure can't end the sweep.

CBC has been seen to abort the process on a valid model. So the solver lives in a child process,
and whatever becomes of it, there is a plan: its own, or that of the fallback with the cause in
``Plan.status``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from typing import IO

from optuna_fleet.alloc.problem import (
    AllocationFailed,
    AllocationProblem,
    Allocator,
    Plan,
)
from optuna_fleet.alloc.timing import timed
from optuna_fleet.alloc.validation import validate
from optuna_fleet.processes import outlet
from optuna_fleet.wire.packing import pack

_logger = logging.getLogger(__name__)

HEADER = struct.Struct("!Q")
"""Length of the pickle that follows it on either pipe."""

_MODULE = "optuna_fleet.alloc.solver_process"


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnderWay:
    problem: AllocationProblem
    deadline: float
    answers_fd: int


class IsolatedAllocator:
    """An :class:`Allocator` in a child process of its own, with a fallback in this one.

    The child starts with the first problem (or :meth:`start`), serves many, and is started again
    after its death. For an event loop: :meth:`submit`, wait until :meth:`fileno` is readable or
    :meth:`deadline` has come, then :meth:`result`. Not thread-safe. On Linux the child also ends
    with the *thread* that started it; the next problem then starts another.

    Args:
        allocator: Asked first; must be picklable.
        fallback: Asked in this process when there is no valid plan in time; must not fail.
        grace_s: Seconds beyond the problem's ``time_limit_s`` before the child is killed.
        startup_s: Further seconds for the first answer of a child, which has to import first.
    """

    def __init__(
        self,
        allocator: Allocator,
        fallback: Allocator,
        *,
        grace_s: float = 2.0,
        startup_s: float = 30.0,
    ) -> None:
        self._allocator = allocator
        self._fallback = fallback
        self._grace_s = grace_s
        self._startup_s = startup_s
        self._child: subprocess.Popen[bytes] | None = None
        self._has_answered = False
        self._under_way: _UnderWay | None = None
        self._dead_end: int | None = None

    @property
    def name(self) -> str:
        """Name of the isolated allocator."""
        return self._allocator.name

    @property
    def pid(self) -> int | None:
        """Process id of the child; None if there is none."""
        return None if self._child is None else self._child.pid

    def allocate(self, problem: AllocationProblem) -> Plan:
        """Solves ``problem`` and waits for it; never raises for trouble with the solver."""
        self.submit(problem)
        return self.result()

    def start(self) -> None:
        """Starts the child, so that the first problem need not wait for its imports.

        Raises:
            OSError: It can't be started; :meth:`submit` would fall back.
        """
        if self._child is not None and self._child.poll() is None:
            return
        self._reap()
        self._child = self._started()
        self._has_answered = False

    def submit(self, problem: AllocationProblem) -> None:
        """Hands ``problem`` to the child and returns at once.

        Raises:
            RuntimeError: The result of the problem before has not been taken.
        """
        if self._under_way is not None:
            raise RuntimeError("A problem is under way; call `result` before the next `submit`.")
        patience_s = problem.time_limit_s + self._grace_s
        try:
            request = pack((self._allocator, problem))
            self.start()
            answers_fd = self._send(request)
        except Exception as error:
            _logger.warning("The solver process can't be asked: %r", error)
            answers_fd = self._open_dead_end()
        patience_s += 0.0 if self._has_answered else self._startup_s
        self._under_way = _UnderWay(
            problem=problem, deadline=time.monotonic() + patience_s, answers_fd=answers_fd
        )

    def fileno(self) -> int:
        """Descriptor that is readable once there is an answer or the child is dead.

        It may change with each :meth:`submit`, and is valid until :meth:`result`.

        Raises:
            RuntimeError: Nothing was submitted.
        """
        return self._current().answers_fd

    def deadline(self) -> float | None:
        """``time.monotonic()`` by which to call :meth:`result`; None if nothing is under way."""
        return None if self._under_way is None else self._under_way.deadline

    def is_answered(self) -> bool:
        """Whether :meth:`result` would not have to wait; false if nothing is under way."""
        if self._under_way is None:
            return False
        poll = select.poll()
        poll.register(self, select.POLLIN)
        return bool(poll.poll(0)) or time.monotonic() >= self._under_way.deadline

    def result(self) -> Plan:
        """The plan of the problem submitted; waits for it until the deadline.

        Returns:
            The solver's plan if it is valid and came in time; else the fallback's, whose
            ``status`` and ``reason`` begin with "fallback: " and the cause.

        Raises:
            RuntimeError: Nothing was submitted.
        """
        current = self._current()
        try:
            plan = self._receive(current)
            validate(current.problem, plan)
        except Exception as error:
            return self._fall_back(current.problem, self._cause(error))
        finally:
            self._under_way = None
            self._close_dead_end()
        return plan

    def close(self) -> None:
        """Ends the child; a problem under way is dropped. A later :meth:`submit` starts one."""
        self._under_way = None
        self._close_dead_end()
        self._reap()

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", _MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=outlet(sys.__stderr__),
            start_new_session=True,
            # What can be imported here must be found there: the user's allocator, a source
            # checkout.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
        )

    def _current(self) -> _UnderWay:
        if self._under_way is None:
            raise RuntimeError("No problem is under way; call `submit` first.")
        return self._under_way

    def _send(self, request: bytes) -> int:
        assert self._child is not None
        stdin, stdout = self._child.stdin, self._child.stdout
        assert stdin is not None
        assert stdout is not None
        # A child that still imports does not read yet, and a pipe holds 64 KiB: don't block the
        # caller.
        threading.Thread(target=_write, args=(stdin, request), daemon=True).start()
        return stdout.fileno()

    def _receive(self, current: _UnderWay) -> Plan:
        (size,) = HEADER.unpack(_read(current.answers_fd, HEADER.size, current.deadline))
        answer = pickle.loads(_read(current.answers_fd, size, current.deadline))
        self._has_answered = True
        if isinstance(answer, Plan):
            return answer
        raise AllocationFailed(str(answer))

    def _cause(self, error: Exception) -> str:
        match error:
            case TimeoutError():
                self._reap()
                return "solver process exceeded its time and was killed"
            case EOFError():
                # The pipe closes a moment before the child can be waited for; its own ending says
                # more.
                return f"solver process {_ending(self._reap(patience_s=0.5))}"
            case AllocationFailed():
                return f"solver failed with {error}"
            case ValueError():
                return f"solver's answer was refused: {error}"
        self._reap()
        return f"solver's answer was not readable: {error!r}"

    def _fall_back(self, problem: AllocationProblem, cause: str) -> Plan:
        _logger.warning(
            "Allocation by %s instead of %s: %s", self._fallback.name, self.name, cause
        )
        plan = timed(self._fallback, problem)
        status = f"fallback: {cause}"
        return replace(plan, status=status, reason=f"{status}; {plan.reason}")

    def _reap(self, patience_s: float = 0.0) -> int | None:
        """Ends the child if it lives on for ``patience_s``; returns its exit code."""
        if self._child is None:
            return None
        child, self._child = self._child, None
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(patience_s)
        if child.returncode is None:
            child.kill()
        code = child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        return code

    def _open_dead_end(self) -> int:
        self._dead_end, writer = os.pipe()
        os.close(writer)
        return self._dead_end

    def _close_dead_end(self) -> None:
        if self._dead_end is not None:
            os.close(self._dead_end)
            self._dead_end = None


def _write(pipe: IO[bytes], request: bytes) -> None:
    # A dead child is seen by the one who waits for its answer.
    with contextlib.suppress(OSError, ValueError):
        pipe.write(HEADER.pack(len(request)) + request)
        pipe.flush()


def _read(fd: int, size: int, deadline: float) -> bytes:
    """Reads ``size`` bytes; raises EOFError if the child ended, TimeoutError past the deadline."""
    chunks = b""
    while len(chunks) < size:
        # Looked at even past the deadline: an answer that is there counts. Not `select`, which
        # refuses descriptors beyond 1023.
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError
        chunk = os.read(fd, size - len(chunks))
        if not chunk:
            raise EOFError
        chunks += chunk
    return chunks


def _ending(code: int | None) -> str:
    if code is None:
        return "could not be asked"
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"died with {signal.Signals(-code).name}"
    return f"died with signal {-code}"
