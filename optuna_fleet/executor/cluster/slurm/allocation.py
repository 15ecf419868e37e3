"""The agents in one allocation of Slurm: an srun for all of them, and one for each that ended."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from optuna_fleet.exceptions import LaunchError
from optuna_fleet.executor.cluster.asking import News
from optuna_fleet.executor.cluster.engine import Departure
from optuna_fleet.executor.cluster.slurm.commands import ask_job, departures_of, is_put_off
from optuna_fleet.executor.cluster.slurm.gpus import ask_gpus, in_steps
from optuna_fleet.executor.cluster.slurm.step import Step
from optuna_fleet.executor.cluster.slurm.threads import Threads
from optuna_fleet.processes import cause_of_death

_MOST_RESTARTS = 3
_RESTART_AFTER_S = 1.0
_END_LIMIT_S = 5.0
_PUT_OFF_S = 20.0  # while Slurm's controller is out of reach
_LOOK_AGAIN_S = 90.0  # before a time limit, which may have been changed; trials leave 60 s before


class Allocation:
    """Threads that start agents, listen to srun, and tell what it says.

    Args:
        agent: Command line of an agent, but for its name.
        nodes: Those that the allocation had in the beginning.
    """

    def __init__(
        self,
        job: str,
        agent: Sequence[str],
        environment: Mapping[str, str],
        nodes: Sequence[str],
    ) -> None:
        self.news = News()
        self._job = job
        self._agent = agent
        self._environment = environment
        # The srun of each node's agent; None until it has begun. Read and changed under the lock.
        self._steps: dict[str, Step | None] = dict.fromkeys(nodes)
        self._gpus: dict[str, int] = {}
        self._num_restarts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._running: set[Step] = set()
        self._closed = threading.Event()
        self._threads = Threads()
        self._notice: tuple[str, float] | None = None
        self._ending: tuple[str, float] | None = None
        self._threads.begin(self._look_and_run)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Those that have an agent, or soon will."""
        return tuple(self._steps)  # at once: a signal handler must not wait for the lock

    def leave(self, cause: str, by: float) -> None:
        """Tell that all nodes will be gone; may be called by a signal handler."""
        self._notice = cause, by
        self._tell_notice(*self.nodes)

    def end(self, cause: str, by: float) -> None:
        """Likewise where Slurm is about to end the job: no agent is started again."""
        self._ending = cause, by
        self.leave(cause, by)

    def _tell_notice(self, *nodes: str) -> None:
        if self._notice is not None:
            cause, by = self._notice
            for node in nodes:
                self.news.tell(Departure(node=node, cause=cause, by=by))

    def leave_out(self, node: str) -> None:
        """Start no other agent on this node."""
        with self._lock:
            self._steps.pop(node, None)

    def close(self) -> None:
        """Wait for the agents' end, which is near, or end them."""
        with self._lock:
            self._closed.set()
            running = list(self._running)
        deadline = time.monotonic() + _END_LIMIT_S
        for step in running:
            step.end(max(0.0, deadline - time.monotonic()))
        self._threads.wait(deadline)
        self.news.close()

    # -- on threads -------------------------------------------------------------------------------

    def _look_and_run(self) -> None:
        job = None
        with contextlib.suppress(LaunchError):  # srun has more patience, and says what is wrong
            job = ask_job(self._job)
            self._gpus = ask_gpus(self._job)
        if job is not None:
            self._steps = dict.fromkeys(job.nodes)  # those that have failed are no longer in it
            if job.end is not None:
                self._threads.begin(self._tell_limit, job.end)
        for nodes in in_steps(self.nodes, self._gpus):
            self._threads.begin(self._run, nodes)

    def _tell_limit(self, end: float) -> None:
        """Tell of the time limit, and again if whoever runs Slurm has put it off meanwhile."""
        told = 0.0
        while end != told and self._ending is None:
            told = end
            self.leave(f"job {self._job} reaches its time limit", by=end)
            if self._closed.wait(min(end - _LOOK_AGAIN_S - time.time(), threading.TIMEOUT_MAX)):
                return
            with contextlib.suppress(LaunchError):
                job = ask_job(self._job)
                end = end if job is None else job.end or math.inf

    def _run(self, nodes: Sequence[str]) -> None:
        """Start agents, and listen to srun until they have ended."""
        try:
            step = self._started(nodes)
        except OSError as error:
            self.news.tell(LaunchError(f"`srun` can't be started: {error}"))
            return
        if step is None:
            return
        self._listen(step)
        how = cause_of_death(step.wait())
        with self._lock:
            its = [node for node, last in self._steps.items() if last is step]
            self._running.discard(step)
        if its and is_put_off(step.said):
            self._threads.begin(self._run_again, its, _PUT_OFF_S)
        else:
            ended = [Departure(node=node, cause=f"its srun ended with {how}") for node in its]
            self._left(*(replace(d, is_replaced=self._num_restarts[d.node] > 0) for d in ended))
        self._tell_if_last(f"The srun of job {self._job} ended with {how}. It said:\n{step.said}")

    def _tell_if_last(self, problem: str) -> None:
        """Tell that there is no node any more, and nothing to wait for."""
        if self._ending is not None and not self._steps:
            cause, by = self._ending
            self._closed.wait(max(0.0, by - time.time()))  # Slurm ends the driver as well
            problem = f"Slurm has ended the agents of job {self._job}: {cause}."
        if not (self._steps or self._closed.is_set()):
            self.news.tell(LaunchError(problem))

    def _started(self, nodes: Sequence[str]) -> Step | None:
        with self._lock:
            nodes = [node for node in nodes if node in self._steps]  # others are left out
            if self._closed.is_set() or not nodes:
                return None
            step = Step(self._agent, nodes, self._gpus, self._environment)
            self._running.add(step)
            self._steps |= dict.fromkeys(nodes, step)
            return step

    def _listen(self, step: Step) -> None:
        """Have what the agents and srun say printed, and heed what srun says of nodes."""
        for line in step.lines():
            is_over = self._ending is not None or self._closed.is_set()
            if not line.startswith("srun: ") or (line.startswith("srun: error: ") and not is_over):
                step.say(line)
            self._left(*departures_of(line))

    def _left(self, *departures: Departure) -> None:
        with self._lock:
            for departure in departures:
                self._note_left(departure)

    def _note_left(self, departure: Departure) -> None:
        node = departure.node
        if node not in self._steps or self._closed.is_set():
            return
        before = 0 if (step := self._steps[node]) and step.has_lasted else self._num_restarts[node]
        self._num_restarts[node] = before + 1
        may_restart = self._ending is None and self._num_restarts[node] <= _MOST_RESTARTS
        if departure.is_replaced and may_restart:
            self._steps[node] = None
            self.news.tell(departure)
            self._tell_notice(node)  # it is about the agent that comes next, too
            self._threads.begin(self._run_again, [node])
            return
        self._steps.pop(node, None)
        if self._ending is not None:
            departure = Departure(node=node, cause=f"Slurm ends its job: {self._ending[0]}")
        self.news.tell(replace(departure, is_replaced=False))

    def _run_again(self, nodes: Sequence[str], wait_s: float = _RESTART_AFTER_S) -> None:
        self._closed.wait(wait_s)
        if self._ending is not None:
            self._left(*(Departure(node=node, cause="") for node in nodes))
            self._tell_if_last("")
        self._run(nodes)  # those that are not left, or left out
