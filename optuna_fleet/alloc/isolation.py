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
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe

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


_GRACE_S = 2.0  # beyond a problem's time limit before the child is killed
_STARTUP_S = 30.0  # more, for the first answer of a child, which has to import first


class IsolatedAllocator:
    """An :class:`Allocator` in a child process of its own, with a fallback in this one.

    The child starts with the first problem (or :meth:`start`), serves many, and is started again
    after its death.

    Args:
        allocator: Asked first; must be picklable.
        fallback: Asked in this process when there is no valid plan in time; must not fail.
    """

    def __init__(self, allocator: Allocator, fallback: Allocator) -> None:
        self._allocator = allocator
        self._fallback = fallback
        self._solver: _Solver | None = None
        self._closings = 0
        self._lock = threading.Lock()  # of the two above
        self._one_at_a_time = threading.Lock()

    @property
    def name(self) -> str:
        """Name of the isolated allocator."""
        return self._allocator.name

    @property
    def pid(self) -> int | None:
        """Process id of the child; None if there is none."""
        return None if self._solver is None else self._solver.process.pid

    def start(self) -> None:
        """Starts the child, so that the first problem need not wait for its imports.

        Raises:
            OSError, LaunchError: It can't be started; :meth:`submit` would fall back.
        """
        with self._lock:
            self._started()

    def submit(self, problem: AllocationProblem) -> Future[Plan]:
        """Has a thread solve the problem, and returns at once.

        Returns:
            To be the solver's plan if it is valid and comes in time; else the fallback's, whose
            ``status`` and ``reason`` begin with "fallback: " and the cause. Cancelled if
            :meth:`close` is called meanwhile.
        """
        plan: Future[Plan] = Future()
        closings = self._closings

        def allocate() -> None:
            try:
                plan.set_result(self._allocate(problem, closings))
            except CancelledError:
                plan.cancel()
            except BaseException as error:
                plan.set_exception(error)

        try:
            threading.Thread(target=allocate, daemon=True).start()
        except RuntimeError as error:  # there can't be more, for now
            plan.set_result(self._fall_back(problem, f"no thread can wait for a solver: {error}"))
        return plan

    def close(self) -> None:
        """Ends the child; who waits for a plan gets none. A later problem starts another one."""
        with self._lock:
            self._closings += 1
            solver, self._solver = self._solver, None
        if solver is not None:
            solver.end()

    def _allocate(self, problem: AllocationProblem, closings: int) -> Plan:
        with self._one_at_a_time:
            try:
                request = pack((self._allocator, problem))
                with self._lock:
                    solver = self._started() if closings == self._closings else None
                if solver is None:
                    raise CancelledError
                plan = solver.plan(request, problem.time_limit_s)
                validate(problem, plan)
                return plan
            except Exception as error:
                if closings != self._closings:
                    raise CancelledError from error
                cause = _cause(error)
        return self._fall_back(problem, cause)

    def _fall_back(self, problem: AllocationProblem, cause: str) -> Plan:
        _logger.warning(
            "Allocation by %s instead of %s: %s", self._fallback.name, self.name, cause
        )
        return fallen_back(self._fallback, problem, cause)

    def _started(self) -> _Solver:
        if self._solver is None or not self._solver.process.is_alive():
            self._solver = _Solver()
        return self._solver


def _cause(error: Exception) -> str:
    match error:
        case AllocationFailed():
            return str(error)
        case ValueError():
            return f"solver's answer was refused: {error}"
    return f"solver process can't be asked or understood: {error!r}"


class _Solver:
    """The child process, seen from here."""

    def __init__(self) -> None:
        self._way, theirs = Pipe()
        with theirs:
            # What can be imported here must be found there: the user's allocator, a source
            # checkout.
            there = {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
            fd = theirs.fileno()
            self.process = ModuleProcess(__name__, fd, environment=there, pass_fds=(fd,))
        self._has_answered = self._was_late = False
        self._reaping = threading.Lock()

    def plan(self, request: bytes, limit_s: float) -> Plan:
        """Its answer, within so many seconds and some more.

        Raises:
            AllocationFailed: There is none, and why.
        """
        limit_s += _GRACE_S + (0.0 if self._has_answered else _STARTUP_S)
        late = threading.Timer(limit_s, self._is_late)
        late.daemon = True
        late.start()
        try:
            self._way.send_bytes(request)
            answer = self._way.recv()
        except (EOFError, OSError) as error:
            raise AllocationFailed(f"solver process {self._ending()}") from error
        finally:
            late.cancel()
        self._has_answered = True
        if isinstance(answer, Plan):
            return answer
        raise AllocationFailed(f"solver failed with {answer}")

    def end(self) -> None:
        """End it now; whoever waits for its answer is told."""
        with self._reaping:
            self.process.kill()

    def _is_late(self) -> None:
        self._was_late = True
        self.end()

    def _ending(self) -> str:
        with self._reaping:
            self.process.close()  # the way closes a moment before it can be waited for
        if self._was_late:
            return "exceeded its time and was killed"
        return f"ended with {cause_of_death(self.process.exit_code or 0)}"


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
