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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from optuna_fleet.arguments import check_number
from optuna_fleet.exceptions import FleetConfigError, LaunchError
from optuna_fleet.executor.cluster.engine import Cluster, Departure, Engine, agent_ended
from optuna_fleet.executor.cluster.placing import PlacingEngine
from optuna_fleet.executor.cluster.slurm.commands import (
    agent_command,
    ask_allocation,
    in_a_step,
    may_pass,
    node_names,
    refusal,
    without_options,
)
from optuna_fleet.executor.given import Options
from optuna_fleet.processes import cause_of_death, outlet
from optuna_fleet.sampler_bridge.compat import fleet_logger
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
    """One of the allocation's.

    Attributes:
        due: When an srun is to be started there, by the monotonic clock.
        srun: The one that runs an agent there; None while there is none.
        said: Its last lines, and those of the agent.
    """

    name: str
    due: float = 0.0
    srun: subprocess.Popen[str] | None = None
    said: str = ""


class SlurmEngine(PlacingEngine):
    """Starts agents in the allocation that this process is in: an srun for each of its nodes.

    Slurm ends no agent for us: those of lost nodes end by their own leases.
    """

    more_may_join = False

    def __init__(self, job: str, agent: Sequence[str], notice_s: float) -> None:
        super().__init__("Slurm", end_limit_s=_END_LIMIT_S + 2 * _KILL_LIMIT_S)
        self._job, self._agent, self._notice_s = job, agent, notice_s
        self._nodes: dict[str, _Node] = {}
        self._running: set[_Node] = set()
        self._handlers: dict[int, Any] = {}

    def _prepare(self, invitation: Invitation) -> None:
        own = invitation.environment() | {"SLURM_JOB_ID": self._job}
        self._environment = without_options(os.environ) | own
        names = node_names(os.environ.get("SLURM_JOB_NODELIST", ""))
        self._nodes = {name: _Node(name) for name in names}
        self._gpus: Mapping[str, int] = {}
        self._limit = math.inf
        self._look_due = 0.0
        self._how = "had no node to start an agent on."
        self._notice: tuple[str, float] | None = None
        self._ending = ""
        self._noticed_at: float | None = None
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGUSR1, signal.SIGTERM):
                if signal.getsignal(number) is signal.SIG_DFL:
                    self._handlers[number] = signal.signal(number, self._signalled)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        """Slurm, or the batch script, says that the job is to end; a later SIGTERM is meant."""
        now = time.monotonic()
        if self._noticed_at is None:
            self._noticed_at = now
            self._ending = f"job {self._job} got {signal.Signals(number).name}"
            self._tell(self._ending, time.time() + self._notice_s)
            self._heard.put(None)
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
        return [name for name in tuple(self._nodes) if name not in self._left_out]

    def close(self) -> None:
        """See `Engine`: waits for the agents' end, which is near, or ends them."""
        if threading.current_thread() is threading.main_thread():
            while self._handlers:
                signal.signal(*self._handlers.popitem())
        super().close()

    # -- on its thread ----------------------------------------------------------------------------

    def _act(self) -> float:
        now = time.monotonic()
        if now >= self._look_due:
            self._look()
        for name in self._left_out.intersection(self._nodes):
            del self._nodes[name]
        for node in [node for node in self._nodes.values() if node.srun is None]:
            if self._ending:
                self._lose(node, "")
            elif node.due <= now:
                self._start(node)
        if not self._nodes:
            self._give_up()
        dues = [node.due for node in self._nodes.values() if node.srun is None]
        return max(0.0, min([self._look_due, *dues]) - time.monotonic())

    def _look(self) -> None:
        """Ask for the nodes, and for the time limit, which may have been put off meanwhile."""
        is_first, self._look_due = self._look_due == 0.0, math.inf
        with contextlib.suppress(LaunchError):  # srun has more patience, and says what is wrong
            there = ask_allocation(self._job)
            if is_first:  # nodes that have failed are no longer in it
                self._nodes = {name: _Node(name) for name in there.nodes}
                self._gpus = there.gpus
            if there.end != self._limit and not self._ending:
                self._limit = there.end
                self._tell(f"job {self._job} reaches its time limit", there.end)
                self._look_due = time.monotonic() + there.end - _LOOK_AGAIN_S - time.time()

    def _give_up(self) -> None:
        problem = f"The srun of job {self._job} {self._how}"
        if self._ending:
            assert self._notice is not None
            self._closed.wait(max(0.0, self._notice[1] - time.time()))  # Slurm ends us as well
            problem = f"Slurm has ended the agents of job {self._job}: {self._ending}."
        if not self._closed.is_set():
            raise LaunchError(problem)

    def _start(self, node: _Node) -> None:
        gpus = self._gpus.get(node.name)
        options = (f"--nodelist={node.name}", *([f"--gpus={gpus}"] if gpus else []))
        try:
            srun = node.srun = subprocess.Popen(
                in_a_step(self._agent, *options),
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=outlet(sys.__stdout__),
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # a Ctrl-C is for the driver
            )
        except OSError as error:
            raise LaunchError(f"`srun` can't be started: {error}") from error
        node.said = ""
        self._running.add(node)

        def listen() -> None:
            assert srun.stderr is not None
            with srun.stderr as lines:
                for line in lines:
                    self._heard.put((node, line))
            self._heard.put((node, ""))

        self._begin(listen)

    def _take(self, word: tuple[_Node, str]) -> None:
        """An agent or its srun has said a line, or ended."""
        node, line = word
        if not line:
            self._ended(node)
            return
        is_over = self._ending or self._closed.is_set() or _TASK_ENDED.match(line)
        is_sruns = line.startswith("srun: ") or _CANCELLED.match(line)
        if is_sruns and (is_over or not line.startswith("srun: error: ")):
            return
        node.said = "".join([*node.said.splitlines(keepends=True)[1 - _LAST_LINES :], line])
        with contextlib.suppress(OSError, ValueError, AttributeError):
            print(line, end="", file=sys.__stderr__, flush=True)

    def _ended(self, node: _Node) -> None:
        """Have another agent started, now or later, or tell that there is none any more."""
        assert node.srun is not None
        code, now = node.srun.wait(), time.monotonic()
        self._how = f"ended with {cause_of_death(code)}. It said:\n{node.said}"
        node.srun = None
        self._running.discard(node)
        refused = refusal(node.said)
        if node.name not in self._nodes or self._closed.is_set():
            return
        if self._ending or any(sign in node.said for sign in _GONE):
            self._lose(node, "Slurm says that it is gone")
        elif refused is not None and may_pass(refused):
            node.due = now + _PUT_OFF_S
        else:
            exit_code = 128 - code if code > 128 else code  # so it says by which signal
            self._inbox.put(agent_ended(node.name, exit_code, is_replaced=True))
            node.due = now + _RESTART_AFTER_S
            if self._notice is not None:  # it is about the agent that comes next, too
                cause, by = self._notice
                self._inbox.put(Departure(node=node.name, cause=cause, by=by))

    def _lose(self, node: _Node, cause: str) -> None:
        del self._nodes[node.name]
        cause = f"Slurm ends its job: {self._ending}" if self._ending else cause
        self._inbox.put(Departure(node=node.name, cause=cause))

    def _leave(self) -> None:
        """Wait a little for the ends of all sruns, and listen to them; then end them."""
        self._nodes = {}
        for number, limit_s in ((signal.SIGTERM, _END_LIMIT_S), (signal.SIGKILL, _KILL_LIMIT_S)):
            deadline = time.monotonic() + limit_s
            while self._running and (left_s := deadline - time.monotonic()) > 0:
                self._hear(left_s)
            for node in self._running:
                assert node.srun is not None
                node.srun.send_signal(number)
        for node in self._running:
            assert node.srun is not None
            node.srun.wait()
        self._running.clear()
