"""Signs of life of a trainer: a thread that says how far the main thread is, and where."""

from __future__ import annotations

import itertools
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from optuna_fleet.exceptions import LaunchError
from optuna_fleet.trainer.session import DriverGoneError, Session
from optuna_fleet.wire.messages import Heartbeat, Phase

PACKAGE = str(Path(__file__).parents[1])

_NOT_THE_USERS = (PACKAGE, sysconfig.get_path("stdlib"))
_JOIN = "join_group"
_SHARED = ("/optuna_fleet/trainer/groups.py", "/torch/distributed/distributed_c10d.py")
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")


@contextmanager
def sending_heartbeats(session: Session, interval_s: float | None) -> Iterator[None]:
    """Send a `Heartbeat` for the run every so many seconds; called in the thread that runs it.

    Raises:
        LaunchError: There can be no thread for it.
    """
    if interval_s is None:
        yield
        return
    over = threading.Event()
    arguments = (session, interval_s, threading.get_ident(), over)
    thread = threading.Thread(
        target=_send, args=arguments, name="optuna-fleet-heartbeat", daemon=True
    )
    try:
        thread.start()
    except RuntimeError as error:
        raise LaunchError(
            f"A trainer can't start a thread ({error}): allow more processes (`ulimit -u`, the "
            "limits of the container), or use fewer `devices`."
        ) from error
    try:
        yield
    finally:
        over.set()
        thread.join()


def _send(session: Session, interval_s: float, main: int, over: threading.Event) -> None:
    # All at one time: then the driver wakes once for many of them.
    while not over.wait(interval_s - time.time() % interval_s):
        where, phase = _where(main)
        heartbeat = Heartbeat(
            run_id=session.run.run_id,
            rank=session.run.rank,
            progress=session.progress,
            is_waiting=session.is_waiting,
            where=where,
            memory_bytes=_private_bytes(),
            phase=phase,
        )
        try:
            session.send(heartbeat)
        except DriverGoneError:
            return


def _where(thread: int) -> tuple[str, Phase]:
    """The innermost line of the user's that a thread is in, what it has called, and its phase."""
    frames = traceback.walk_stack(sys._current_frames()[thread])
    stack = traceback.StackSummary.extract(frames, lookup_lines=False)
    innermost = stack[0]
    users = next((f for f in stack if is_users(f.filename)), innermost)
    place = f"in {users.name} ({users.filename}:{users.lineno})"
    called = itertools.takewhile(lambda f: not is_users(f.filename), stack)
    phase = phase_of([(f.filename, f.name) for f in called])
    if phase is Phase.JOINING:
        place = f"looks for the other ranks, {place}"
    return place if users is innermost else f"{place}, within {innermost.name}", phase


def is_users(path: str) -> bool:
    """Whether a file is none of this package, of Python, or of what is installed."""
    is_installed = "/site-packages/" in path or "/dist-packages/" in path
    return not is_installed and not path.startswith(_NOT_THE_USERS)


def phase_of(called: Sequence[tuple[str, str]]) -> Phase:
    """The phase of a thread, by the files and functions that it is in below the user's own."""
    shared = [name for file, name in called if file.endswith(_SHARED)]
    if not shared or any(file.startswith("<frozen importlib") for file, _ in called):
        return Phase.OBJECTIVE
    return Phase.JOINING if _JOIN in shared else Phase.COLLECTIVE


def _private_bytes() -> int:
    """Memory of this process that it shares with no other; chunks of data are shared."""
    try:
        resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    except OSError:  # too many open files, say
        return 0
    return (resident - shared) * _PAGE_BYTES
