"""Slurm, inside an allocation: an srun for each of its nodes starts an agent there."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from optuna_fleet.arguments import check_number
from optuna_fleet.exceptions import FleetConfigError, LaunchError
from optuna_fleet.executor.cluster.engine import Cluster, Departure, Engine, agent_ended
from optuna_fleet.executor.cluster.slurm.commands import (
    Allocation,
    agent_command,
    ask_allocation,
    in_a_step,
    is_put_off,
    node_names,
    without_options,
)
from optuna_fleet.executor.given import Options
from optuna_fleet.processes import cause_of_death, outlet
from optuna_fleet.sampler_bridge.compat import fleet_logger
from optuna_fleet.wire.inbox import Inbox
from optuna_fleet.wire.invitation import Invitation

_SAME_NOTICE_S = 1.0  # Slurm may signal the driver, and the batch script, which signals it too
_RESTART_AFTER_S = 1.0
_PUT_OFF_S = 20.0  # while Slurm's controller is out of reach
_LOOK_AGAIN_S = 90.0  # before a time limit, which may have been changed; trials leave 60 s before
_END_LIMIT_S = 5.0
_KILL_LIMIT_S = 2.0
_LAST_LINES = 5
_CANCELLED = re.compile(r"slurmstepd\S*: error: \*\*\* STEP \S+ ON \S+ CANCELLED AT ")
_TASK_ENDED = re.compile(r"srun: error: \S+: task \S+: ")  # how, is told of the agent
_GONE = (
    "srun: error: Node failure on ",
    "Invalid job id specified",
    "already completing or completed",
    " has expired",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmCluster(Cluster):
    """The nodes of the Slurm allocation in which the script runs.

    Each node offers the GPUs that Slurm has given to the job there, or, where it has given none,
    as many CPU slots as cores; `devices` of the executor says how many of each node.

    Args:
        slots_per_device: Trainers on each device: several small trials may share a GPU.
        notice_s: Seconds until the nodes are taken after a signal has announced that: SIGUSR1 or
            SIGTERM, of which Slurm, or the batch script for it, sends one.

    Raises:
        FleetConfigError: One of them is out of range.
    """

    slots_per_device: int = 1
    notice_s: float = 30.0

    def __post_init__(self) -> None:
        check_number("slots_per_device", self.slots_per_device, least=1, whole=True)
        check_number("notice_s", self.notice_s, least=0)

    def engine(self, options: Options) -> Engine:
        """See `Cluster`."""
        job = check_allocation(os.environ)
        agent = agent_command(
            options.devices, options.device_type, self.slots_per_device, self.notice_s
        )
        return SlurmEngine(job, agent, self.notice_s)


def check_allocation(environment: Mapping[str, str]) -> str:
    """The number of the job that this process is in.

    Raises:
        FleetConfigError: It is in none, or it is one of several alike.
    """
    job = environment.get("SLURM_JOB_ID", "")
    if not job or shutil.which("srun") is None:
        missing = "there is no `srun`" if job else "SLURM_JOB_ID is not set"
        raise FleetConfigError(
            f"cluster='slurm' needs a Slurm allocation, but {missing}: run the script in one "
            "(`optuna-fleet submit`, `sbatch`, `salloc`), or see HarvestCluster for pilot jobs."
        )
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if "SLURM_STEP_ID" in environment and tasks != "1":
        raise FleetConfigError(
            f"The script was started by an `srun` of {tasks} tasks, so there would be {tasks} "
            "drivers: start it without srun, or with `srun --nodes=1 --ntasks=1`."
        )
    return job


def hint_at_slurm(environment: Mapping[str, str]) -> None:
    """Say that there are more nodes than the one whose devices are to be used."""
    nodes = environment.get("SLURM_JOB_NUM_NODES", "1")
    if nodes != "1":
        fleet_logger.info(
            f"This Slurm job has {nodes} nodes, and cluster='local' uses one: cluster='slurm' "
            "uses all."
        )


@dataclass(slots=True, eq=False)
class _Node:
    """One of the allocation's; `said`: the last lines of its srun, and of the agent."""

    name: str
    said: deque[str] = field(default_factory=lambda: deque(maxlen=_LAST_LINES))


class SlurmEngine(Engine):
    """Starts agents in the allocation that this process is in: an srun for each of its nodes.

    Slurm ends no agent for us: those of lost nodes end by their own leases.
    """

    more_may_join = False

    def __init__(self, job: str, agent: Sequence[str], notice_s: float) -> None:
        self._job, self._agent, self._notice_s = job, agent, notice_s
        self._nodes: dict[str, _Node] = {}
        self._running: dict[subprocess.Popen[bytes], threading.Thread] = {}  # which read of them
        self._handlers: dict[int, Any] = {}
        self._is_closed = True

    def open(self, invitation: Invitation, inbox: Inbox) -> None:
        """See `Engine`."""
        own = invitation.environment() | {"SLURM_JOB_ID": self._job}
        self._environment = without_options(os.environ) | own
        self._inbox = inbox
        names = node_names(os.environ.get("SLURM_JOB_NODELIST", ""))
        self._nodes = {name: _Node(name) for name in names}
        self._gpus: Mapping[str, int] = {}
        self._limit = math.inf
        self._has_looked = False
        self._how = "had no node to start an agent on."
        self._notice: tuple[str, float] | None = None
        self._ending = ""
        self._noticed_at: float | None = None
        self._is_closed = False
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGUSR1, signal.SIGTERM):
                if signal.getsignal(number) is signal.SIG_DFL:
                    self._handlers[number] = signal.signal(number, self._signalled)
        self._look()

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        """Slurm, or the batch script, says that the job is to end; a later SIGTERM is meant."""
        now = time.monotonic()
        if self._noticed_at is None:
            self._noticed_at = now
            self._ending = f"job {self._job} got {signal.Signals(number).name}"
            self._tell(self._ending, time.time() + self._notice_s)
        elif number == signal.SIGTERM and now - self._noticed_at > _SAME_NOTICE_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _tell(self, cause: str, by: float) -> None:
        """Tell that all nodes will be gone."""
        self._notice = cause, by
        for name in self.expected():
            self._inbox.put(Departure(node=name, cause=cause, by=by))

    def expected(self) -> Sequence[str]:
        """See `Engine`."""
        return tuple(self._nodes)

    def end(self, node: str, *, for_good: bool = False) -> None:
        """See `Engine`."""
        if for_good:
            self._nodes.pop(node, None)

    def close(self) -> None:
        """See `Engine`: waits a little for the agents' end, which is near, then ends them."""
        if threading.current_thread() is threading.main_thread():
            while self._handlers:
                signal.signal(*self._handlers.popitem())
        if self._is_closed:
            return
        self._nodes, self._is_closed = {}, True
        running = dict(self._running)
        for number, limit_s in ((signal.SIGTERM, _END_LIMIT_S), (signal.SIGKILL, _KILL_LIMIT_S)):
            deadline = time.monotonic() + limit_s
            for srun, reader in running.items():
                reader.join(max(0.0, deadline - time.monotonic()))
                if reader.is_alive():
                    srun.send_signal(number)
        for srun in running:
            srun.wait()  # it has ended, or is killed
        self._running = {}

    # -- on a thread of each srun -----------------------------------------------------------------

    def _read(self, node: _Node, srun: subprocess.Popen[bytes]) -> None:
        """Print what an srun and its agent say, until both have ended."""
        assert srun.stderr is not None
        with srun, srun.stderr as lines:  # waits for its end
            for data in lines:
                line = data.decode(errors="replace").rstrip() + "\n"
                is_over = self._ending or self._is_closed or _TASK_ENDED.match(line)
                is_sruns = line.startswith("srun: ") or _CANCELLED.match(line)
                if not is_sruns or (line.startswith("srun: error: ") and not is_over):
                    node.said.append(line)
                    _print(line)  # where the terminal blocks, they wait for it, too
        self._inbox.call_later(0.0, self._ended, node, srun)

    # -- in a turn of the inbox, but `_look` ------------------------------------------------------

    def _look(self) -> None:
        """Ask for the nodes, and for the time limit, which may have been put off meanwhile."""
        inbox = self._inbox

        def ask() -> None:  # for minutes, perhaps
            there = None
            try:
                there = ask_allocation(self._job)
            except LaunchError:  # srun has more patience, and says what is wrong
                pass
            except Exception as error:
                problem = f"scontrol's answer about job {self._job} can't be read"
                inbox.put(LaunchError(f"{problem}: {type(error).__name__}: {error}"))
                return
            inbox.call_later(0.0, self._looked, there)

        _thread(ask)

    def _looked(self, there: Allocation | None) -> None:
        is_first, self._has_looked = not self._has_looked, True
        if self._is_closed:
            return
        if there is not None and is_first:  # nodes that have failed are no longer in it
            self._nodes = {name: _Node(name) for name in there.nodes}
            self._gpus = there.gpus
        if there is not None and there.end != self._limit and not self._ending:
            self._limit = there.end
            self._tell(f"job {self._job} reaches its time limit", there.end)
            if there.end < math.inf:
                self._inbox.call_later(there.end - _LOOK_AGAIN_S - time.time(), self._look)
        if is_first:
            for node in list(self._nodes.values()):
                self._start(node)
            self._give_up_without_nodes()

    def _give_up_without_nodes(self) -> None:
        if self._nodes or self._is_closed:
            return
        problem, after_s = f"The srun of job {self._job} {self._how}", 0.0
        if self._ending:
            assert self._notice is not None
            after_s = self._notice[1] - time.time()  # Slurm ends us as well
            problem = f"Slurm has ended the agents of job {self._job}: {self._ending}."
        self._inbox.later(after_s, LaunchError(f"Slurm can't place agents any more: {problem}"))

    def _start(self, node: _Node) -> None:
        if self._nodes.get(node.name) is not node or self._is_closed:
            return
        if self._ending:
            self._lose(node, "")
            return
        gpus = self._gpus.get(node.name)
        options = (f"--nodelist={node.name}", *([f"--gpus={gpus}"] if gpus else []))
        node.said.clear()
        try:
            srun = subprocess.Popen(
                in_a_step(self._agent, *options),
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=outlet(sys.__stdout__),
                stderr=subprocess.PIPE,
                start_new_session=True,  # a Ctrl-C is for the driver
            )
        except OSError as error:
            self._inbox.put(LaunchError(f"`srun` can't be started: {error}"))
            return
        try:
            self._running[srun] = _thread(self._read, node, srun)
        except RuntimeError:  # no more threads
            srun.kill()
            raise

    def _ended(self, node: _Node, srun: subprocess.Popen[bytes]) -> None:
        """Have another agent started, now or later, or tell that there is none any more."""
        self._running.pop(srun, None)
        code = srun.wait()
        said = "".join(node.said)
        self._how = f"ended with {cause_of_death(code)}. It said:\n{said}"
        if self._nodes.get(node.name) is not node:
            return
        if self._ending or any(sign in said for sign in _GONE):
            self._lose(node, "Slurm says that it is gone")
        elif is_put_off(said):
            self._inbox.call_later(_PUT_OFF_S, self._start, node)
        else:
            exit_code = 128 - code if code > 128 else code  # so it says by which signal
            self._inbox.put(agent_ended(node.name, exit_code, is_replaced=True))
            self._inbox.call_later(_RESTART_AFTER_S, self._start, node)
            if self._notice is not None:  # it is about the agent that comes next, too
                cause, by = self._notice
                self._inbox.put(Departure(node=node.name, cause=cause, by=by))

    def _lose(self, node: _Node, cause: str) -> None:
        del self._nodes[node.name]
        cause = f"Slurm ends its job: {self._ending}" if self._ending else cause
        self._inbox.put(Departure(node=node.name, cause=cause))
        self._give_up_without_nodes()


def _thread(run: Callable[..., None], *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=run, args=arguments, name="optuna-fleet-slurm", daemon=True)
    thread.start()
    return thread


def _print(text: str) -> None:
    """Print to standard error: a terminal may block (Ctrl-S), as may a pipe."""
    # No `print`: the lock that it holds while it blocks is wanted when Python ends.
    with contextlib.suppress(OSError, ValueError):
        if (stream := sys.__stderr__) is not None:
            left = text.encode(stream.encoding, "backslashreplace")
            while left:
                left = left[os.write(stream.fileno(), left) :]
