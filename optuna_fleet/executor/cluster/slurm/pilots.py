"""Which pilot jobs there are, and how many are missing. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from optuna_fleet.executor.cluster.engine import Departure
from optuna_fleet.executor.cluster.slurm.commands import Job

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
    "COMPLETED": "has ended",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PilotLimits:
    """How many pilots there may be.

    Attributes:
        most: That wait and run; those about to reach their time limit come on top.
        renewal_s: So long before a pilot's time limit another one is submitted.
        shares_nodes: Whether several may be on one node.
    """

    most: int
    renewal_s: float
    shares_nodes: bool = False


@dataclass(slots=True, kw_only=True)
class Pilots:
    """The pilots of one engine, as its last look at Slurm's queue has shown them.

    Attributes:
        wanted: So many nodes would be used; None: as many as there are.
    """

    limits: PilotLimits
    wanted: int | None = None
    waiting: list[Job] = field(default_factory=list)
    running: list[Job] = field(default_factory=list)
    ending: list[Job] = field(default_factory=list)
    _staying: set[Job] = field(default_factory=set)  # those that run, and did at the look before
    _lost: set[Job] = field(default_factory=set)
    _failed: set[str] = field(default_factory=set)
    _first_seen: dict[str, float] = field(default_factory=dict)
    _num_failures: int = 0
    _num_refusals: int = 0
    _next_submission: float = 0.0
    _dropped: set[str] = field(default_factory=set)
    _surplus_since: float | None = None

    def see(self, jobs: Sequence[Job], now: float) -> list[Departure]:
        """What the queue shows now: which nodes have left since the last look, or will."""
        before = {job.number: job for job in (*self.running, *self.ending)}
        self.waiting = [job for job in jobs if job.state in _WAITING]
        self.running = [job for job in jobs if job.state in _RUNNING and job.nodes]
        self.ending = [
            before[job.number] for job in jobs if job.state in _ENDING and job.number in before
        ]
        self._staying = set(before.values()).intersection(self.running)
        self._lost.intersection_update(self._staying)
        self._count_failures(jobs, now)
        there = {self.name_of(job) for job in (*self.running, *self.ending)}
        states = {job.number: job.state for job in jobs}
        departures = [
            Departure(node=node, cause=_cause(job, states.get(job.number, "")))
            for job in before.values()
            if (node := self.name_of(job)) not in there
        ]
        known = {(job.number, job.nodes, job.end) for job in before.values()}
        departures += [
            Departure(
                node=self.name_of(job),
                cause=f"its pilot, job {job.number}, reaches its time limit",
                by=job.end,
            )
            for job in self.running
            if job.end is not None and (job.number, job.nodes, job.end) not in known
        ]
        return departures

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
        return job.nodes[0] + (f".{job.number}" if self.limits.shares_nodes else "")

    def lose(self, nodes: Iterable[str]) -> None:
        """These were lost before the last look: whose pilot is there at the next, is so in vain.

        One that the last was the first to show may have come since.
        """
        self._lost |= {job for job in self._staying if self.name_of(job) in nodes}

    # -- what to do -------------------------------------------------------------------------------

    @property
    def _target(self) -> int:
        most = self.limits.most
        return most if self.wanted is None else min(most, self.wanted)

    def missing(self, now: float) -> int:
        """How many to submit now."""
        if now < self._next_submission:
            return 0
        waiting = sum(job.number not in self._dropped for job in self.waiting)
        return min(_SUBMITTED_AT_ONCE, max(0, self._room(now) - waiting))

    def _room(self, now: float) -> int:
        """How many are wanted beside those that run, and will for a while."""
        return max(0, self._target - len(self._lasting(now)) - len(self.ending))

    def _lasting(self, now: float) -> list[Job]:
        return [job for job in self.running if not self._is_near_end(job, now)]

    def _is_near_end(self, job: Job, now: float) -> bool:
        return job.end is not None and job.end - now < self.limits.renewal_s

    def to_cancel(self, now: float) -> list[str]:
        """Those that are not wanted, or will never start, or are lost, until they are `cancelled`.

        Of those that run and have long been too many, the ones that would end first.
        """
        lost = [job.number for job in self.running if job in self._lost]
        held = [job.number for job in self.waiting if "held" in job.reason.lower()]
        others = [job.number for job in self.waiting if job.number not in held]
        unwanted = {*lost, *held, *others[self._room(now) :], *self._surplus(now)}
        return sorted(unwanted - self._dropped)

    def cancelled(self, numbers: Iterable[str]) -> None:
        """Slurm was told to cancel these."""
        self._dropped.update(numbers)

    def _surplus(self, now: float) -> list[str]:
        surplus = len(self._lasting(now)) - self._target
        if surplus <= 0:
            self._surplus_since = None
            return []
        if self._surplus_since is None:
            self._surplus_since = now
        if now - self._surplus_since < _SURPLUS_S:
            return []
        jobs = sorted(self._lasting(now), key=lambda job: job.end or math.inf)
        return [job.number for job in jobs[:surplus]]

    def refused(self, now: float) -> None:
        """A submission, or a pilot at its beginning, has failed: the next one is tried later."""
        pause_s = min(_FIRST_PAUSE_S * 2**self._num_refusals, _LONGEST_PAUSE_S)
        self._num_refusals += 1
        self._next_submission = now + pause_s


def _cause(job: Job, state: str) -> str:
    return f"its pilot, job {job.number}, {_CAUSES.get(state, 'has ended')}"
