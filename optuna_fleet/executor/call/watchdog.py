"""Which runs hang, break a limit of their trial, or have come apart: judged by signs of life.

A rank lives while its process gives signs of life, and progresses while the batches and calls that
it counts in them become more. A rank that never asked for a batch can't be told from one that
computes for long: only its life is watched, unless it waits for its peers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from optuna_fleet.exceptions import OutOfMemoryError, TrialError, TrialTimeoutError
from optuna_fleet.executor.call.ranks import out_of_step
from optuna_fleet.executor.call.runs import RunRecord
from optuna_fleet.options import NUM_HEARTBEATS, Limits
from optuna_fleet.wire.messages import Heartbeat, Phase

_LOOK_EVERY_S = 5.0  # at runs of which nothing is heard: there may be hundreds


@dataclass(frozen=True, slots=True)
class Hung:
    """A run that hangs, how, and whether its ranks have only looked for each other."""

    run: RunRecord
    words: str
    is_rendezvous: bool


class Watchdog:
    """Watches the runs of one call; one that it has found fault with it watches no more.

    Args:
        describe: Returns in words what is seen from outside of the process of a device.

    Attributes:
        look_every_s: So often `hung` is to be asked.
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
        self._looked = clock()
        self._most_bytes: float = limits.trial_memory_bytes or math.inf
        self.look_every_s = min((limits.hang_s or math.inf) / NUM_HEARTBEATS, _LOOK_EVERY_S)

    def launched(self, run: RunRecord) -> None:
        """A run begins."""
        run.started = run.progressed = now = self._clock()
        run.heard = dict.fromkeys(range(len(run.launch.devices)), now)

    def left_s(self, run: RunRecord) -> float:
        """Seconds until its trial has had devices for too long."""
        return (self._limits.trial_s or math.inf) - self._flown(run)

    def ended(self, run: RunRecord) -> None:
        """A run has ended on all its devices."""
        run.trial.flown_s = self._flown(run)

    def hear(self, run: RunRecord, heartbeat: Heartbeat) -> TrialError | None:
        """A rank gives a sign of life; return what its trial fails with, if it does."""
        rank, before = heartbeat.rank, run.heartbeats.get(heartbeat.rank)
        if rank not in run.heard:
            return None
        run.heard[rank] = now = self._clock()
        run.heartbeats[rank] = heartbeat
        progress = heartbeat.progress
        # Before the first batch, imports and downloads take what they take.
        prepares = not progress.num_batches and heartbeat.phase is Phase.OBJECTIVE
        waits_for_us = heartbeat.is_waiting and rank == 0
        if before is None or _count(heartbeat) != _count(before) or prepares or waits_for_us:
            run.progressed = now
        is_first = rank == next(iter(run.heard))  # once for all ranks: there may be hundreds
        return self.error(run) if is_first or heartbeat.memory_bytes > self._most_bytes else None

    def error(self, run: RunRecord) -> TrialError | None:
        """That of a trial that has broken a limit, or whose ranks have come apart."""
        error = self._error(run) if run.heard else None
        if error is not None:
            run.heard.clear()
        return error

    def _error(self, run: RunRecord) -> TrialError | None:
        number, limits = run.launch.number, self._limits
        if limits.trial_s is not None and self._flown(run) >= limits.trial_s:
            return TrialTimeoutError(
                f"Trial {number} took more than trial_s={limits.trial_s:g} seconds on its devices."
            )
        for rank, heartbeat in run.heartbeats.items():
            if heartbeat.memory_bytes > self._most_bytes:
                return OutOfMemoryError(
                    f"Trial {number}, rank {rank}, took {heartbeat.memory_bytes} bytes of memory, "
                    f"more than trial_memory_bytes={self._most_bytes}."
                )
        if len(run.launch.devices) == 1:
            return None
        # Those at work can't come together again, with each other or with one that has left.
        at_work = {r: run.heartbeats[r].progress for r in run.heard if r in run.heartbeats}
        left = {one.rank: one.progress for one in run.ended if one.progress.way_out}
        return out_of_step(at_work | left)

    def hung(self, runs: Collection[RunRecord]) -> list[Hung]:
        """Return those that hang now."""
        limit_s, now, before = self._limits.hang_s, self._clock(), self._looked
        self._looked = now
        if limit_s is None:
            return []
        if now - before > self.look_every_s + limit_s / 2:
            for run in runs:  # we were away ourselves, and signs of life wait to be read
                run.progressed, run.heard = now, dict.fromkeys(run.heard, now)
        found = []
        for run in runs:
            since = min(run.progressed, *run.heard.values()) if run.heard else math.inf
            if now - since >= limit_s:
                where = "; ".join(self._stand(run, rank, now) for rank in sorted(run.heard))
                words = f"it made no progress for {limit_s:g} s ({where})"
                found.append(Hung(run, words, is_rendezvous=may_be_joining(run)))
                run.heard.clear()
        return found

    def _stand(self, run: RunRecord, rank: int, now: float) -> str:
        heartbeat = run.heartbeats.get(rank)
        outside = self._describe(run.launch.devices[rank])
        silent_s = now - run.heard[rank]
        parts = [f"rank {rank}: {heartbeat.where if heartbeat else 'gave no sign of life'}"]
        if heartbeat is not None:
            parts.append(f"after {heartbeat.progress.num_batches} batches")
        if heartbeat is not None and silent_s > 2 * self._limits.heartbeat_s:
            parts.append(f"no sign of life for {silent_s:.3g} s")
        return ", ".join([*parts, *([outside] if outside else [])])

    def _flown(self, run: RunRecord) -> float:
        return run.trial.flown_s + max(0.0, self._clock() - run.started)


def _count(heartbeat: Heartbeat) -> int:
    return heartbeat.progress.num_batches + heartbeat.progress.num_calls


def may_be_joining(run: RunRecord) -> bool:
    """Whether its ranks have told nothing, or that they look for each other."""
    told = (run.heartbeats[rank] for rank in run.heard if rank in run.heartbeats)
    return bool(run.heard) and all(one.phase is Phase.JOINING for one in told)
