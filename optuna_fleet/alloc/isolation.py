"""Runs an allocator where its death, its hanging or its failure can't end the sweep.

CBC has been seen to abort the process on a valid model. So the solver lives in a child process
(`main`), and whatever becomes of it, there is a plan: its own, or that of the fallback with the
cause in ``Plan.status``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import sys
import threading
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe, wait

from optuna_fleet.alloc.problem import AllocationFailed, AllocationProblem, Allocator, Plan
from optuna_fleet.alloc.validation import validate
from optuna_fleet.processes import ModuleProcess, cause_of_death
from optuna_fleet.wire.packing import pack

_logger = logging.getLogger(__name__)


def timed(allocator: Allocator, problem: AllocationProblem) -> Plan:
    """The allocator's plan, with `solve_time_s` set: allocators themselves know no clock."""
    started = time.perf_counter()
    plan = allocator.allocate(problem)
    elapsed_s = time.perf_counter() - started
    # What is no plan is for the caller to refuse: the allocator may be the user's.
    return replace(plan, solve_time_s=elapsed_s) if isinstance(plan, Plan) else plan


def fallen_back(fallback: Allocator, problem: AllocationProblem, cause: str) -> Plan:
    """The fallback's plan; its ``status`` and ``reason`` begin with "fallback: " and the cause."""
    plan = timed(fallback, problem)
    status = f"fallback: {cause}"
    return replace(plan, status=status, reason=f"{status}; {plan.reason}")


def in_process(allocator: Allocator, fallback: Allocator, problem: AllocationProblem) -> Plan:
    """The allocator's plan, or the fallback's where it has none, in this process."""
    try:
        return timed(allocator, problem)
    except AllocationFailed as error:
        return fallen_back(fallback, problem, str(error))


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnderWay:
    problem: AllocationProblem
    deadline: float
    answers: Connection


class IsolatedAllocator:
    """An :class:`Allocator` in a child process of its own, with a fallback in this one.

    The child starts with the first problem (or :meth:`start`), serves many, and is started again
    after its death. For an event loop: :meth:`submit`, wait until :meth:`fileno` is readable or
    :meth:`deadline` has come, then :meth:`result`. Not thread-safe.

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
        self._child: ModuleProcess | None = None
        self._way: Connection | None = None  # to the child
        self._writers: list[threading.Thread] = []
        self._has_answered = False
        self._under_way: _UnderWay | None = None

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
            OSError, LaunchError: It can't be started; :meth:`submit` would fall back.
        """
        if self._child is not None and self._child.is_alive():
            return
        self._reap()
        self._has_answered = False
        self._way, theirs = Pipe()
        with theirs:
            # What can be imported here must be found there: the user's allocator, a source
            # checkout.
            there = {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
            fd = theirs.fileno()
            self._child = ModuleProcess(__name__, fd, environment=there, pass_fds=(fd,))

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
            answers = self._sent(request)
        except Exception as error:
            _logger.warning("The solver process can't be asked: %r", error)
            self._reap()
            answers, nobody = Pipe()
            nobody.close()
        patience_s += 0.0 if self._has_answered else self._startup_s
        self._under_way = _UnderWay(
            problem=problem, deadline=time.monotonic() + patience_s, answers=answers
        )

    def fileno(self) -> int:
        """Descriptor that is readable once there is an answer or the child is dead.

        It may change with each :meth:`submit`, and is valid until :meth:`result`.

        Raises:
            RuntimeError: Nothing was submitted.
        """
        return self._current().answers.fileno()

    def deadline(self) -> float | None:
        """``time.monotonic()`` by which to call :meth:`result`; None if nothing is under way."""
        return None if self._under_way is None else self._under_way.deadline

    def is_answered(self) -> bool:
        """Whether :meth:`result` would not have to wait; false if nothing is under way."""
        current = self._under_way
        if current is None:
            return False
        return current.answers.poll() or time.monotonic() >= current.deadline

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
        return plan

    def close(self) -> None:
        """Ends the child; a problem under way is dropped. A later :meth:`submit` starts one."""
        self._under_way = None
        self._reap()
        while self._writers:
            self._writers.pop().join()  # what it wrote to is gone

    def _current(self) -> _UnderWay:
        if self._under_way is None:
            raise RuntimeError("No problem is under way; call `submit` first.")
        return self._under_way

    def _sent(self, request: bytes) -> Connection:
        assert self._way is not None
        requests = Connection(os.dup(self._way.fileno()), readable=False)
        # A child that still imports does not read yet, and a socket holds 200 KiB: don't block
        # the caller.
        writer = threading.Thread(target=_write, args=(requests, request), daemon=True)
        writer.start()
        self._writers = [w for w in self._writers if w.is_alive()] + [writer]
        return self._way

    def _receive(self, current: _UnderWay) -> Plan:
        # Looked at even past the deadline: an answer that is there counts.
        if not current.answers.poll(max(0.0, current.deadline - time.monotonic())):
            raise TimeoutError
        answer = current.answers.recv()
        self._has_answered = True
        if isinstance(answer, Plan):
            return answer
        raise AllocationFailed(str(answer))

    def _cause(self, error: Exception) -> str:
        match error:
            case TimeoutError():
                self._reap()
                return "solver process exceeded its time and was killed"
            case EOFError() | OSError():
                # The way closes a moment before the child can be waited for; its own ending says
                # more.
                return f"solver process {self._reap(patience_s=0.5)}"
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
        return fallen_back(self._fallback, problem, cause)

    def _reap(self, patience_s: float = 0.0) -> str:
        """Ends the child if it lives on for ``patience_s``; says how it ended."""
        child, self._child, self._way = self._child, None, None
        if child is None:
            return "could not be asked"
        wait([child.fileno()], patience_s)
        child.kill()
        return f"ended with {cause_of_death(child.exit_code or 0)}"


def _write(requests: Connection, request: bytes) -> None:
    # A dead child is seen by the one who waits for its answer.
    with contextlib.suppress(OSError), requests:
        requests.send_bytes(request)


# -- in the child ---------------------------------------------------------------------------------


def main() -> None:
    """Answers requests, ``(allocator, problem)``, by a plan or the text of what went wrong."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    way = Connection(pickle.loads(sys.stdin.buffer.read()))  # its descriptor: from our parent
    with open(os.devnull, "wb") as nowhere:  # for what solvers print
        os.dup2(nowhere.fileno(), 1)
    # Until the driver is gone, or was killed and waits for no answer.
    with contextlib.suppress(EOFError, OSError), way:
        while True:
            way.send_bytes(_answer(way.recv_bytes()))


def _answer(request: bytes) -> bytes:
    try:
        allocator, problem = pickle.loads(request)
        return pickle.dumps(timed(allocator, problem))
    except Exception as error:
        return pickle.dumps(f"{type(error).__name__}: {error}")
