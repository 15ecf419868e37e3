"""Slurm, outside an allocation: pilot jobs of one node each, which come and go."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shlex
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from optuna_fleet.arguments import check_number, check_that, path
from optuna_fleet.exceptions import FleetConfigError, LaunchError
from optuna_fleet.executor.cluster.engine import Cluster, Departure, Engine, PlacingEngine
from optuna_fleet.executor.cluster.slurm.commands import (
    Job,
    agent_command,
    ask,
    ask_jobs,
    in_a_step,
    may_pass,
)
from optuna_fleet.executor.given import Options
from optuna_fleet.sampler_bridge.compat import fleet_logger
from optuna_fleet.wire.invitation import Invitation

_RENEWAL_SHARE = 0.25  # of a pilot's time limit, in which another one is submitted
_LONGEST_RENEWAL_S = 300.0
_SHORTEST_GAP_S = 2.0
_SUBMITTED_AT_ONCE = 8
_FIRST_PAUSE_S = 15.0
_LONGEST_PAUSE_S = 600.0
_MOST_FAILURES = 5
_LASTING_S = 60.0
_SURPLUS_S = 60.0  # how many can be used is not sure before all trials are under way
_WAITING = {"PENDING", "CONFIGURING", "REQUEUED"}
_RUNNING = {"RUNNING", "SUSPENDED", "STOPPED"}
_ENDING = {"COMPLETING", "STAGE_OUT", "SIGNALING", "RESIZING"}  # whatever it will be next
_FAILED = {"FAILED", "BOOT_FAIL", "OUT_OF_MEMORY"}
_CAUSES = {
    "PENDING": "was requeued",
    "REQUEUED": "was requeued",
    "PREEMPTED": "was preempted",
    "TIMEOUT": "reached its time limit",
    "CANCELLED": "was cancelled",
    "NODE_FAIL": "was on a node that failed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HarvestCluster(Cluster):
    """Nodes that Slurm has to spare: pilot jobs of one node each, which come and go.

    Trials move to nodes that come, and away from those that leave, with or without notice. The
    script runs where it lasts: on a login node, or in a small job of its own.

    Args:
        partition: Where pilots are submitted; None for the site's default. One for jobs that may
            be preempted gives most.
        max_nodes: Most pilots that wait and run; one about to end has a successor on top.
        time_limit_s: Of each pilot, rounded up to minutes; short ones fit into more gaps.
        gpus_per_node: To ask for with ``--gres``; None where nodes are given with all they have.
        exclusive: Ask for whole nodes; else several pilots may be on one.
        sbatch: More options of sbatch, as in ``"--account=abc --constraint=a100"``.
        slots_per_device: Trainers on each device: several small trials may share a GPU.
        notice_s: Seconds until a node is taken after Slurm has announced it (its ``GraceTime``).
        logs: Folder for what the pilots print, on a disk that all nodes share.

    Raises:
        FleetConfigError: One of them is out of range.
    """

    partition: str | None = None
    max_nodes: int = 32
    time_limit_s: float = 3600.0
    gpus_per_node: int | None = None
    exclusive: bool = True
    sbatch: str = ""
    slots_per_device: int = 1
    notice_s: float = 30.0
    logs: str | os.PathLike[str] = "optuna-fleet-pilots"

    def __post_init__(self) -> None:
        check_number("max_nodes", self.max_nodes, least=1, whole=True)
        check_number("time_limit_s", self.time_limit_s, least=60, most=1e8)
        check_number("gpus_per_node", self.gpus_per_node, least=1, whole=True, optional=True)
        check_number("slots_per_device", self.slots_per_device, least=1, whole=True)
        check_number("notice_s", self.notice_s, least=0)
        check_that(
            "sbatch",
            self.sbatch,
            lambda given: isinstance(given, str) and all(o[:1] == "-" for o in shlex.split(given)),
            "be options of sbatch, as in '--account=abc --constraint=a100'",
        )
        object.__setattr__(self, "logs", path("logs", self.logs))

    def engine(self, options: Options) -> Engine:
        """See `Cluster`."""
        if shutil.which("sbatch") is None:
            raise FleetConfigError(
                "HarvestCluster submits pilot jobs to Slurm, but there is no `sbatch` here: run "
                "the script on a login node of the cluster."
            )
        agent = agent_command(
            options.devices, options.device_type, self.slots_per_device, self.notice_s
        )
        return HarvestEngine(self, agent)

    def options(self) -> list[str]:
        """Those of sbatch."""
        given = {
            "partition": self.partition,
            "time": math.ceil(self.time_limit_s / 60),
            "gres": f"gpu:{self.gpus_per_node}" if self.gpus_per_node else None,
            "output": f"{self.logs}/%j.out",
        }
        named = [f"--{name}={value}" for name, value in given.items() if value is not None]
        return named + ["--exclusive"] * self.exclusive + shlex.split(self.sbatch)


@dataclass(slots=True)
class Pilots:
    """Which pilots the last look at Slurm's queue has shown, and how many are missing. Pure.

    Attributes:
        wanted: So many nodes would be used; None: as many as there are.
        dropped: Numbers of those that Slurm was told to cancel.
    """

    cluster: HarvestCluster
    wanted: int | None = None
    waiting: list[Job] = field(default_factory=list)
    running: list[Job] = field(default_factory=list)
    ending: list[Job] = field(default_factory=list)
    dropped: set[str] = field(default_factory=set)
    _lost: set[str] = field(default_factory=set)
    _failed: set[str] = field(default_factory=set)
    _first_seen: dict[str, float] = field(default_factory=dict)
    _num_failures: int = 0
    _num_refusals: int = 0
    _next_submission: float = 0.0
    _surplus_since: float = math.inf

    def see(self, jobs: Sequence[Job], now: float) -> list[Departure]:
        """What the queue shows now: which nodes have left since the last look, or will."""
        before = {job.number: job for job in (*self.running, *self.ending)}
        self.waiting = [job for job in jobs if job.state in _WAITING]
        self.running = [job for job in jobs if job.state in _RUNNING and job.nodes]
        self.ending = [
            before[job.number] for job in jobs if job.state in _ENDING and job.number in before
        ]
        self._lost.intersection_update(job.number for job in self.running)
        self._count_failures(jobs, now)
        there = {self.name_of(job) for job in (*self.running, *self.ending)}
        states = {job.number: job.state for job in jobs}
        departures = [
            self._departure(job, _CAUSES.get(states.get(job.number, ""), "has ended"))
            for job in before.values()
            if self.name_of(job) not in there
        ]
        known = {(job.number, job.nodes, job.end) for job in before.values()}
        departures += [
            self._departure(job, "reaches its time limit", job.end)
            for job in self.running
            if job.end is not None and (job.number, job.nodes, job.end) not in known
        ]
        return departures

    def _departure(self, job: Job, what: str, by: float | None = None) -> Departure:
        cause = f"its pilot, job {job.number}, {what}"
        return Departure(node=self.name_of(job), cause=cause, by=by)

    def _count_failures(self, jobs: Iterable[Job], now: float) -> None:
        self._first_seen = {
            job.number: self._first_seen.get(job.number, now) for job in self.running
        }
        failed = {job.number for job in jobs if job.state in _FAILED}
        if any(now - first >= _LASTING_S for first in self._first_seen.values()):
            self._num_failures = self._num_refusals = 0
        elif failed - self._failed:
            self._num_failures += 1
            self.refused(now)
        self._failed = failed

    @property
    def are_hopeless(self) -> bool:
        """Whether pilot after pilot has failed at once."""
        return self._num_failures >= _MOST_FAILURES

    def name_of(self, job: Job) -> str:
        """What the agent of a running pilot calls its node."""
        return job.nodes[0] + ("" if self.cluster.exclusive else f".{job.number}")

    def lose(self, nodes: Iterable[str]) -> None:
        """These were lost: the pilots that were there at the last look are so in vain."""
        self._lost.update(job.number for job in self.running if self.name_of(job) in nodes)

    # -- what to do -------------------------------------------------------------------------------

    @property
    def _target(self) -> int:
        most = self.cluster.max_nodes
        return most if self.wanted is None else min(most, self.wanted)

    def missing(self, now: float) -> int:
        """How many to submit now."""
        if now < self._next_submission:
            return 0
        waiting = sum(job.number not in self.dropped for job in self.waiting)
        return min(_SUBMITTED_AT_ONCE, max(0, self._room(now) - waiting))

    def _room(self, now: float) -> int:
        """How many are wanted beside those that run, and will for a while."""
        return max(0, self._target - len(self._lasting(now)) - len(self.ending))

    def _lasting(self, now: float) -> list[Job]:
        """Those that run, and are not so near to their time limits that others are submitted."""
        renewal_s = min(self.cluster.time_limit_s * _RENEWAL_SHARE, _LONGEST_RENEWAL_S)
        return [j for j in self.running if j.end is None or j.end - now >= renewal_s]

    def to_cancel(self, now: float) -> list[str]:
        """Those that are not wanted, or will never start, or are lost, until they are `dropped`.

        Of those that run and have long been too many, the ones that would end first.
        """
        held = {job.number for job in self.waiting if "held" in job.reason.lower()}
        others = [job.number for job in self.waiting if job.number not in held]
        unwanted = {*self._lost, *held, *others[self._room(now) :], *self._surplus(now)}
        return sorted(unwanted - self.dropped)

    def _surplus(self, now: float) -> list[str]:
        jobs = sorted(self._lasting(now), key=lambda job: job.end or math.inf)
        surplus = len(jobs) - self._target
        self._surplus_since = min(self._surplus_since, now) if surplus > 0 else math.inf
        has_lasted = now - self._surplus_since >= _SURPLUS_S
        return [job.number for job in jobs[: surplus if has_lasted else 0]]

    def refused(self, now: float) -> None:
        """A submission, or a pilot at its beginning, has failed: the next one is tried later."""
        pause_s = min(_FIRST_PAUSE_S * 2**self._num_refusals, _LONGEST_PAUSE_S)
        self._num_refusals += 1
        self._next_submission = now + pause_s


class HarvestEngine(PlacingEngine):
    """Submits pilots, and looks after them.

    Args:
        agent: Command line of an agent, but for its name.
        check_s: Seconds between two looks at Slurm's queue, which tells of nothing by itself.
    """

    def __init__(
        self, cluster: HarvestCluster, agent: Sequence[str], check_s: float = 15.0
    ) -> None:
        super().__init__("Slurm", gap_s=min(_SHORTEST_GAP_S, check_s))
        self._cluster, self._check_s = cluster, check_s
        suffix = "" if cluster.exclusive else ".$SLURM_JOB_ID"
        self._script = f"#!/bin/sh\nexec {shlex.join(in_a_step(agent, suffix=suffix))}\n"
        self._pilots = Pilots(cluster)

    def expected(self) -> Sequence[str]:
        """See `Engine`."""
        return [self._pilots.name_of(job) for job in list(self._pilots.running)]

    def _prepare(self, invitation: Invitation) -> None:
        self._environment = invitation.environment()
        self._pilots = Pilots(self._cluster)
        self._job_name = f"optuna-fleet-{secrets.token_hex(4)}"
        self._mine = (f"--name={self._job_name}", f"--user={os.getuid()}")  # whatever $USER says
        self._has_pilots = self._is_troubled = False

    def _act(self) -> float:
        pilots, now = self._pilots, time.time()
        pilots.wanted = self._wanted
        pilots.lose(self._ends())
        try:
            for departure in pilots.see(ask_jobs(*self._mine), now) if self._has_pilots else ():
                self._inbox.put(departure)
            self._drop(pilots.to_cancel(now))
            for _ in range(pilots.missing(now)):
                if not self._closed.is_set():
                    self._submit()
            self._is_troubled = False
        except LaunchError as error:
            self._struggle(error)
        if pilots.are_hopeless:
            printed = f"see {self._cluster.logs} for what they printed"
            raise LaunchError(f"all pilot jobs end as soon as they start: {printed}.")
        return self._check_s

    def _drop(self, numbers: Sequence[str]) -> None:
        if numbers:
            with contextlib.suppress(LaunchError):  # they have just ended, or it is tried again
                ask("scancel", *numbers)
                self._pilots.dropped.update(numbers)

    def _submit(self) -> None:
        Path(self._cluster.logs).mkdir(parents=True, exist_ok=True)
        ask(
            *("sbatch", "--parsable", "--export=ALL", f"--job-name={self._job_name}"),
            *("--nodes=1", "--ntasks-per-node=1", "--requeue", "--open-mode=append"),
            *self._cluster.options(),
            text=self._script,
            environment=self._environment,
        )
        self._has_pilots = True

    def _struggle(self, error: LaunchError) -> None:
        """Slurm did not do what it was asked to.

        Raises:
            LaunchError: It never will.
        """
        if not (self._has_pilots or may_pass(str(error))):
            raise LaunchError(f"no pilot job can be submitted. {error}") from error
        self._pilots.refused(time.time())
        if not self._is_troubled:
            fleet_logger.warning(f"{error} The harvest goes on as soon as Slurm lets it.")
        self._is_troubled = True

    def _leave(self) -> None:
        try:
            ask("scancel", "--quiet", *self._mine)
        except LaunchError as error:
            self._tell_of_left(str(error))

    def _is_stuck(self) -> None:
        self._tell_of_left("Slurm does not answer.")

    def _tell_of_left(self, why: str) -> None:
        if self._has_pilots:
            fleet_logger.warning(
                f"{why} Pilot jobs may be left in Slurm's queue. They end by themselves as "
                f"they start; `scancel --name={self._job_name}` removes them."
            )
