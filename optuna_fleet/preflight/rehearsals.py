"""Forks a process for each rank of each rehearsal, and waits for what they have noted.

Of a process that has imported what they need, never uses torch itself, and is single-threaded.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from optuna_fleet.accelerator import ACCELERATORS
from optuna_fleet.preflight.notes import Ending, Order, Rehearsed
from optuna_fleet.processes import cause_of_death, die_with
from optuna_fleet.wire.node_messages import ProcessId, StoreReady

_TICK_S = 1.0
_GRACE_S = 5.0  # for ranks whose peer has failed
_NICENESS = 5  # trials go first
ENVIRONMENT = {
    **{each.visible: "" for each in ACCELERATORS},
    "OMP_WAIT_POLICY": "PASSIVE",
    "TORCHDYNAMO_DISABLE": "1",
    # Trackers of experiments keep nothing of rehearsals.
    "WANDB_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "COMET_DISABLE_AUTO_LOGGING": "1",
    "COMET_MODE": "DISABLED",
    "CLEARML_OFFLINE_MODE": "1",
    "SWANLAB_MODE": "disabled",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
    # MLflow can't be told to keep nothing, and makes this folder if it is used.
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_TRACKING_URI": f"file://{tempfile.gettempdir()}/optuna-fleet-preflight-mlflow",
}
"""What rehearsals find in their environment, whatever the script has there."""


@dataclass(slots=True, kw_only=True)
class _Child:
    """One rank: `file` is where it leaves what it has noted."""

    group: int
    pid: int
    pidfd: int
    file: int
    began: float = field(default_factory=time.monotonic)
    ran: Rehearsed | None = None


def prepare_process() -> None:
    """This process is for checks from now on, and for nothing else."""
    os.environ.update(ENVIRONMENT)
    if (compiler := sys.modules.get("torch._dynamo")) is not None:
        compiler.config.disable = True
    os.nice(_NICENESS)


def rehearsed(groups: Sequence[Sequence[Order]], limit_s: float) -> list[list[Rehearsed]]:
    """Rehearse side by side, each order in a process of its own.

    Args:
        groups: Each is one rehearsal: the orders of its ranks.
        limit_s: For each.
    """
    children = [child for number, group in enumerate(groups) for child in _begun(number, group)]
    _await(children, dict.fromkeys(range(len(groups)), limit_s))
    return [
        [child.ran for child in children if child.group == number and child.ran]
        for number in range(len(groups))
    ]


def _begun(number: int, group: Sequence[Order]) -> list[_Child]:
    if len(group) == 1:
        return [_started(number, group[0])]
    with socket.create_server(("127.0.0.1", 0)) as listener:  # where ranks find each other
        process = ProcessId("preflight", os.getpid())
        store = StoreReady(host="127.0.0.1", port=listener.getsockname()[1], process=process)
        orders = [replace(order, store=store) for order in group]
        return [_started(number, order, listener) for order in orders]


def _started(group: int, order: Order, listener: socket.socket | None = None) -> _Child:
    """Start the process of one rank; the first one serves the store."""

    def rehearses() -> Rehearsed:
        os.setpgid(0, 0)  # it ends with what it has started
        from optuna_fleet.preflight.rehearsal import rehearse
        from optuna_fleet.trainer.groups import store_on

        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nowhere, stream)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        store = None
        if listener is not None and order.rank == 0:
            store = store_on(listener)
        elif listener is not None:
            listener.close()
        found = rehearse(order)
        del store
        return found

    pid, file = forked(rehearses)
    return _Child(group=group, pid=pid, pidfd=os.pidfd_open(pid), file=file)


def _await(children: Sequence[_Child], deadlines: dict[int, float]) -> None:
    """Wait until all have ended: each before its group's deadline, or they are ended."""
    now, looked = 0.0, time.monotonic()
    while running := [child for child in children if child.ran is None]:
        wait_s = min(deadlines[child.group] for child in running) - now
        pidfds = [child.pidfd for child in running]
        ready = select.select(pidfds, [], [], min(max(0.0, wait_s), _TICK_S))[0]
        # A machine that stands still, or is suspended, is no fault of theirs.
        before, looked = looked, time.monotonic()
        now += min(looked - before, 2 * _TICK_S)
        for child in running:
            is_late = now >= deadlines[child.group]
            if child.pidfd in ready or is_late:
                child.ran = _ended(child, is_late=child.pidfd not in ready)
                if not child.ran.is_whole:
                    soon = min(deadlines[child.group], now + _GRACE_S)
                    deadlines[child.group] = soon


def _ended(child: _Child, *, is_late: bool) -> Rehearsed:
    with contextlib.suppress(ProcessLookupError):  # with what it has started
        os.killpg(child.pid, signal.SIGKILL)
    os.kill(child.pid, signal.SIGKILL)  # if it has not begun
    _, status, usage = os.wait4(child.pid, 0)
    cause = cause_of_death(os.waitstatus_to_exitcode(status))
    found = Rehearsed(ending=Ending.DIED, problem=f"its process ended by {cause}")
    if is_late:
        found = Rehearsed(ending=Ending.LATE, problem="it did not end in time")
    elif os.waitstatus_to_exitcode(status) == 0:
        found = left_in(child.file) or found
    os.close(child.pidfd)
    os.close(child.file)
    found.wall_s = time.monotonic() - child.began
    found.cpu_s = usage.ru_utime + usage.ru_stime
    return found


def forked(give: Callable[[], object]) -> tuple[int, int]:
    """Fork a process that ends when it has left what is given in a file: both are returned."""
    file, parent = os.memfd_create("rehearsed"), os.getpid()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            die_with(parent)
            with open(file, "wb", closefd=False) as out:
                pickle.dump(give(), out)
            code = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)
    return pid, file


def left_in(file: int) -> Any:
    """What a fork has left there, if anything."""
    with open(file, "rb", closefd=False) as left, contextlib.suppress(Exception):
        left.seek(0)
        return pickle.load(left)  # from our own child
    return None
