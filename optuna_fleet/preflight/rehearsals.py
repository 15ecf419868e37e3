"""What a rehearsal is told and what it notes; each rank is a forked process, which is waited for.

It is forked from one that has imported what it needs, never uses torch itself, and is
single-threaded. Nothing here needs torch: orders are made in the driver.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from optuna.study import Study, StudyDirection

from optuna_fleet.accelerator import ACCELERATORS
from optuna_fleet.pipeline.preprocessor.payload import Payload
from optuna_fleet.pipeline.spec import PipelineSpec
from optuna_fleet.preflight.verdict import Key
from optuna_fleet.processes import cause_of_death, die_with
from optuna_fleet.wire.node_messages import ProcessId, StoreReady

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Rehearse an objective as one rank.

    Attributes:
        objective_at: Where it is.
        objective_id: Which it is there.
        params: What is suggested; None for what is drawn.
        study: See `facts_of`.
        is_double: All in float64.
        moves: It is moved at each mini-epoch's end, and in the midst of movable passes.
        is_nudged: Parameters are changed as little as rounding does.
        num_batches: So many, and a part of one, in each pass over training data.
        store: Where several ranks find each other.
    """

    objective_at: str
    objective_id: int
    params: Mapping[str, Any] | None
    study: Mapping[str, Any]
    seed: int
    spec: PipelineSpec | None = None
    payload: Payload | None = None
    num_threads: int = 1
    is_double: bool = True
    moves: bool = False
    is_nudged: bool = False
    num_batches: int = 2
    rank: int = 0
    world_size: int = 1
    store: StoreReady | None = None

    @property
    def maximize(self) -> bool | None:
        """As of `RunTrial`."""
        directions = self.study["directions"]
        return directions[0] is StudyDirection.MAXIMIZE if len(directions) == 1 else None


def facts_of(study: Study) -> dict[str, Any]:
    """What an objective may ask its study for."""
    names = "study_name", "user_attrs", "directions"
    return {name: getattr(study, name) for name in names} | {"direction": study.directions[0]}


# -- what is noted --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sketch:
    """Numbers, small enough to be kept, and equal if all of them are.

    Attributes:
        digest: Of all.
        shape: Of the tensor.
        numbers: The same; of many, sums of parts of them with random signs.
        largest: The largest number's absolute value.
    """

    digest: bytes
    shape: tuple[int, ...] = field(compare=False)
    numbers: npt.NDArray[np.float64] = field(compare=False)
    largest: float = field(compare=False)


Value: TypeAlias = Sketch | str | None
Record: TypeAlias = dict[Key, Value]


class Ending(Enum):
    """How a rehearsal ended; of ranks that did not come to their end the first has the cause."""

    WHOLE = "whole"  # it returned, or was left at the end of the last loop
    PLAIN = "plain"  # it prepares nothing
    RAISED = "raised"
    UNFIT = "unfit"  # it can't be checked
    DIED = "died"
    CUT_OFF = "cut off"  # its peers have ended
    LATE = "late"


@dataclass(slots=True, kw_only=True)
class Rehearsed:
    """What a rank has noted, and how far it is; goes on over moves.

    Attributes:
        problem: Why it ended so, in a sentence.
        params: What was suggested; of choices that are objects the position.
        num_steps: Of optimizers.
        num_epochs: Mini-epochs begun.
        num_passes: Over batches.
        sizes: Those of the batches that were read.
        refused: Why it could not be moved.
        is_rough: Numbers of less precision than float32 were computed.
        place: Loop and mini-epoch.
        step: The optimizers', in that.
        moved_within: The mini-epoch in whose midst it was last to be moved.
    """

    ending: Ending = Ending.WHOLE
    problem: str = ""
    traceback: str = ""
    record: Record = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    user_attrs: dict[str, Any] = field(default_factory=dict)
    num_steps: int = 0
    num_epochs: int = 0
    num_passes: int = 0
    num_moves: int = 0
    sizes: set[int] = field(default_factory=set)
    refused: str = ""
    is_rough: bool = False
    place: tuple[int, int] = (0, 0)
    step: int = 0
    moved_within: tuple[int, int] = (0, 0)

    @property
    def is_whole(self) -> bool:
        """Whether it came to its end."""
        return self.ending is Ending.WHOLE


# -- processes ------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Child:
    """One rank: `file` is where it leaves what it has noted."""

    group: int
    pid: int
    pidfd: int
    file: int
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
    _await(children, [time.monotonic() + limit_s] * len(groups))
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


def _await(children: Sequence[_Child], deadlines: list[float]) -> None:
    """Wait until all have ended: each before its group's deadline, or they are ended."""
    while running := [child for child in children if child.ran is None]:
        wait_s = min(deadlines[child.group] for child in running) - time.monotonic()
        ready = select.select([child.pidfd for child in running], [], [], max(0.0, wait_s))[0]
        now = time.monotonic()
        for child in running:
            if child.pidfd in ready or now >= deadlines[child.group]:
                child.ran = _ended(child, is_late=child.pidfd not in ready)
                if not child.ran.is_whole:
                    deadlines[child.group] = min(deadlines[child.group], now + _GRACE_S)


def _ended(child: _Child, *, is_late: bool) -> Rehearsed:
    with contextlib.suppress(ProcessLookupError):  # with what it has started
        os.killpg(child.pid, signal.SIGKILL)
    os.kill(child.pid, signal.SIGKILL)  # if it has not begun
    found = left_by(child.pid, child.file)
    os.close(child.pidfd)
    return Rehearsed(ending=Ending.LATE, problem="it did not end in time") if is_late else found


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


def left_by(pid: int, file: int) -> Any:
    """What a fork has left in its file, when it has ended, or that it died; closes the file."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with open(file, "rb") as left, contextlib.suppress(Exception):
        if code == 0:
            left.seek(0)
            return pickle.load(left)  # from our own child
    return Rehearsed(ending=Ending.DIED, problem=f"its process ended by {cause_of_death(code)}")
