"""Which runs hang, break a limit of their trial, or have come apart: judged by signs of life.

A rank lives while its process gives signs of life, and progresses while the batches and calls that
it counts in them become more. A rank that never asked for a batch can't be told from one that
computes for long: only its life is watched, unless it waits for its peers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from optuna_fleet.events import Launch
from optuna_fleet.exceptions import OutOfMemoryError, TrialError, TrialTimeoutError
from optuna_fleet.executor.call.ranks import out_of_step
from optuna_fleet.options import NUM_HEARTBEATS, Limits
from optuna_fleet.wire.messages import Ended, Heartbeat, Phase

_LOOK_EVERY_S = 5.0  # at runs of which nothing is heard: there may be hundreds
_CLOCK_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Hung:
    """A run that hangs: `is_rendezvous` if its ranks have only looked for each other."""

    run_id: int
    after_s: float
    where: tuple[str, ...]
    is_rendezvous: bool

    def __str__(self) -> str:
        return f"it made no progress for {self.after_s:g} s ({'; '.join(self.where)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A run whose trial has broken a limit, and the error that it fails with."""

    run_id: int
    error: TrialError


@dataclass(slots=True, kw_only=True)
class _Watched:
    launch: Launch
    launched: float
    progressed: float
    heard: dict[int, float]
    heartbeats: dict[int, Heartbeat] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    ended: dict[int, Ended] = field(default_factory=dict)


class Watchdog:
    """Watches the runs of one call.

    Args:
        describe: Returns in words what is seen from outside of the process of a device.
    """

    def __init__(
        self,
        limits: Limits,
        describe: Callable[[int], str] = lambda device: "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._describe = describe
        self._clock = clock
        self._runs: dict[int, _Watched] = {}
        self._flown_s: dict[int, float] = {}
        self._checked = self._looked = clock()
        self._heard: set[int] = set()  # runs of which there is news since the last check
        self._due = math.inf  # when the first may have flown for too long

    def launched(self, launch: Launch) -> None:
        """A run begins."""
        now = self._clock()
        heard = dict.fromkeys(range(len(launch.devices)), now)
        self._runs[launch.run_id] = _Watched(
            launch=launch, launched=now, progressed=now, heard=heard
        )
        if self._limits.trial_s is not None:
            left_s = self._limits.trial_s - self._flown_s.get(launch.number, 0.0)
            self._due = min(self._due, now + left_s)

    def ended(self, run_id: int, *, is_done: bool) -> None:
        """A run has ended, and with it the trial if that `is_done`."""
        run = self._runs.pop(run_id, None)
        if run is None:
            return
        number = run.launch.number
        if is_done:
            self._flown_s.pop(number, None)
        else:
            self._flown_s[number] = self._flown(run)

    def rank_ended(self, ended: Ended) -> None:
        """A rank has left the objective: there is nothing more to hear of it."""
        if run := self._runs.get(ended.run_id):
            run.heard.pop(ended.rank, None)
            run.ended[ended.rank] = ended
            self._heard.add(ended.run_id)

    def hear(self, heartbeat: Heartbeat) -> None:
        """A rank gives a sign of life."""
        run = self._runs.get(heartbeat.run_id)
        if run is None or heartbeat.rank not in run.heard:
            return
        now = self._clock()
        self._heard.add(heartbeat.run_id)
        run.heard[heartbeat.rank] = now
        run.heartbeats[heartbeat.rank] = heartbeat
        progress = heartbeat.progress
        count = progress.num_batches + progress.num_calls
        # Before the first batch, imports and downloads take what they take.
        prepares = not progress.num_batches and heartbeat.phase is Phase.OBJECTIVE
        waits_for_us = heartbeat.is_waiting and heartbeat.rank == 0
        if count != run.counts.get(heartbeat.rank) or prepares or waits_for_us:
            run.progressed = now
        run.counts[heartbeat.rank] = count

    def may_be_joining(self, run_id: int) -> bool:
        """Whether all that its ranks have told is that they look for each other, if anything."""
        return run_id in self._runs and _may_be_joining(self._runs[run_id])

    def waits_s(self) -> list[float]:
        """Seconds until the next `check`, if there is anything to check."""
        waits = [self._due - self._clock()] if self._due < math.inf else []
        if self._limits.hang_s is not None:
            waits.append(self._limits.hang_s / NUM_HEARTBEATS)
        return waits if self._runs else []

    def check(self) -> list[Hung | Broken]:
        """Returns what is wrong now; each run is named once."""
        now, before = self._clock(), self._checked
        self._checked = now
        if self._limits.hang_s is not None and now - before > self._limits.hang_s / 2:
            self._pardon(now)  # we were away ourselves, and signs of life wait to be read
        found = [fault for run in self._to_look_at(now) if (fault := self._fault(run, now))]
        for fault in found:
            self.ended(fault.run_id, is_done=isinstance(fault, Broken))
        return found

    def _to_look_at(self, now: float) -> list[_Watched]:
        """Those of which there is news; all, where time alone may have told."""
        heard, self._heard = self._heard, set()
        limits, is_due = self._limits, now >= self._due
        if limits.hang_s is not None:
            is_due |= now - self._looked >= min(limits.hang_s / NUM_HEARTBEATS, _LOOK_EVERY_S)
        if not is_due:
            return [self._runs[run_id] for run_id in heard & self._runs.keys()]
        self._looked = now
        if limits.trial_s is not None:
            ends = (now + limits.trial_s - self._flown(run) for run in self._runs.values())
            self._due = max(now + _CLOCK_S, min(ends, default=math.inf))
        return list(self._runs.values())

    def _pardon(self, now: float) -> None:
        for run in self._runs.values():
            run.progressed = now
            run.heard = dict.fromkeys(run.heard, now)

    def _fault(self, run: _Watched, now: float) -> Hung | Broken | None:
        launch, limits = run.launch, self._limits
        if (error := self._error_of(run)) is not None:
            return Broken(run_id=launch.run_id, error=error)
        if limits.hang_s is not None and self._hangs(run, now, limits.hang_s):
            where = tuple(self._stand(run, rank, now) for rank in sorted(run.heard))
            return Hung(
                run_id=launch.run_id,
                after_s=limits.hang_s,
                where=where,
                is_rendezvous=_may_be_joining(run),
            )
        return None

    def _error_of(self, run: _Watched) -> TrialError | None:
        """That of a trial that has broken a limit, or whose ranks have come apart."""
        number, limits = run.launch.number, self._limits
        if limits.trial_s is not None and self._flown(run) >= limits.trial_s:
            return TrialTimeoutError(
                f"Trial {number} took more than trial_s={limits.trial_s:g} seconds on its devices."
            )
        most = math.inf if limits.trial_memory_bytes is None else limits.trial_memory_bytes
        for rank, heartbeat in run.heartbeats.items():
            if heartbeat.memory_bytes > most:
                return OutOfMemoryError(
                    f"Trial {number}, rank {rank}, took {heartbeat.memory_bytes} bytes of memory, "
                    f"more than trial_memory_bytes={most}."
                )
        return _parted(run)

    def _hangs(self, run: _Watched, now: float, limit_s: float) -> bool:
        if any(now - heard >= limit_s for heard in run.heard.values()):
            return True
        return bool(run.heard) and now - run.progressed >= limit_s

    def _stand(self, run: _Watched, rank: int, now: float) -> str:
        heartbeat = run.heartbeats.get(rank)
        outside = self._describe(run.launch.devices[rank])
        silent_s = now - run.heard[rank]
        parts = [f"rank {rank}: {heartbeat.where if heartbeat else 'gave no sign of life'}"]
        if heartbeat is not None:
            parts.append(f"after {heartbeat.progress.num_batches} batches")
        if heartbeat is not None and silent_s > 2 * self._limits.heartbeat_s:
            parts.append(f"no sign of life for {silent_s:.3g} s")
        return ", ".join([*parts, *([outside] if outside else [])])

    def _flown(self, run: _Watched) -> float:
        return self._flown_s.get(run.launch.number, 0.0) + self._clock() - run.launched


def _may_be_joining(run: _Watched) -> bool:
    heartbeats = (run.heartbeats.get(rank) for rank in run.heard)
    return all(one is None or one.phase is Phase.JOINING for one in heartbeats)


def _parted(run: _Watched) -> TrialError | None:
    """Ranks at work that can't come together again, with each other or with one that has left."""
    if not run.heard:
        return None
    progress = {
        rank: run.heartbeats[rank].progress for rank in run.heard if rank in run.heartbeats
    }
    ended = {rank: one.progress for rank, one in run.ended.items() if one.progress.way_out}
    return out_of_step(progress | ended)
