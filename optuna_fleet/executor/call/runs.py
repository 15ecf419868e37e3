"""What the driver runs and how: the job of a call, and each run with what its ranks said."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from optuna_fleet.events import CheckpointSaved, Ending, Launch, RunFailed
from optuna_fleet.exceptions import OutOfMemoryError, TrainerLostError
from optuna_fleet.executor.call.ranks import RunCalls, parted
from optuna_fleet.executor.given import Options
from optuna_fleet.sampler_bridge.records import Flight
from optuna_fleet.settings import Settings
from optuna_fleet.wire.calls import EndEpoch
from optuna_fleet.wire.messages import Ended, Heartbeat, Place
from optuna_fleet.wire.node_messages import TrainerExited
from optuna_fleet.wire.packing import unpack, unpack_error


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to run, for all trials of a call."""

    options: Options
    objective_id: int
    objective: bytes
    settings: Settings
    gc_after_trial: bool
    maximize: bool | None


class RemoteTraceback(Exception):  # noqa: N818 - shown as the cause of an exception
    """The traceback of an exception in the process where it was raised."""

    __module__ = "optuna_fleet"  # as it is shown


class StopLine:
    """The step at which all ranks of a run can stop within an epoch, to leave it or to be saved.

    It is the furthest place that a rank has told, once all have. A rank waits where it has told
    that it is. One that leaves the objective is no longer waited for, and the others go on to see
    for themselves.

    Attributes:
        saves: They are to be saved there, and go on.
        stays: They are to leave, and their trial goes on with rank 0's device.
    """

    def __init__(self) -> None:
        self.saves = self.stays = False
        self._awaited: set[int] = set()
        self._furthest: Place = (0, 0, 0)

    @property
    def is_asked(self) -> bool:
        """Whether ranks have not told yet where they are."""
        return bool(self._awaited)

    def ask(self, ranks: Iterable[int], *, saves: bool, stays: bool = False) -> list[int]:
        """These ranks are to stop; return who must be asked for it where they are.

        None if they were asked already: what they tell serves for both, and to leave counts.
        """
        was_asked = self.is_asked
        if not (was_asked and saves):
            self.saves, self.stays = saves, stays
        if was_asked:
            return []
        self._awaited, self._furthest = set(ranks), (0, 0, 0)
        return sorted(self._awaited)

    def take(self, rank: int, place: Place = (0, 0, 0)) -> Place | None:
        """A rank is at this place, or has left; return where to stop if it was the last."""
        if rank not in self._awaited:
            return None
        self._awaited.discard(rank)
        self._furthest = max(self._furthest, place)
        return None if self._awaited else self._furthest


@dataclass(slots=True, kw_only=True)
class Left:
    """What a trial's last run has left, in memory and in a checkpoint.

    Attributes:
        run_id: Of that run.
        device: Of its rank 0, whose process writes the checkpoint.
        holds: That process has the state in memory too.
        is_pending: Nobody has told yet whether the checkpoint is written.
        saved: It is, which the controller has not heard.
        follower: The run that has gone on with it.
    """

    run_id: int
    device: int
    is_pending: bool
    holds: bool = True
    saved: CheckpointSaved | None = None
    follower: int = -1


@dataclass(slots=True, kw_only=True)
class TrialRecord:
    """What outlives the runs of a trial that is not done.

    Attributes:
        left: What its last run has left, if that was told.
        was_launched: At least once, be it by a driver that is dead.
        flown_s: For so many seconds it had devices, in runs that have ended.
        moved_s: What its move has cost so far; None if it has trained since, or was not moved.
        traits: By which checks know its kind.
        has_complained: It was told that it goes on without a new checkpoint.
    """

    left: Left | None = None
    was_launched: bool = False
    flown_s: float = 0.0
    moved_s: float | None = None
    traits: frozenset[str] = frozenset()
    has_complained: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class RunRecord:
    """One stay of a trial on its devices.

    Attributes:
        start: When it was launched, in seconds since the epoch.
        has_one_clock: All its ranks are on one node.
        ended: How its ranks ended, in order of arrival.
        lost: Devices whose trainers died before their ranks had ended.
        causes: What became of ranks that were lost.
        saved: When it was last told to make a checkpoint, by the monotonic clock.
        started: When its ranks were told to begin, likewise.
        pending_epoch: Rank 0's unanswered question what to do after an epoch.
        verdict: The error that the trial fails with, if it broke a limit.
        stop_line: Where it leaves its devices within an epoch, or is saved.
        is_movable: It has said that it reads batches between which it can move.
        has_died: A trainer has died before its rank had ended, and not because we have killed it.
        began_anew: What began anew with it, as a check has found; "" for nothing.
        will_be_saved: A time is set at which it is looked whether it is to be saved.
        will_linger: A time is set after which what its ranks have left is free.
        leaving: Since when its trial is about to leave its devices, as `start`.
        heard: When each rank that is at work gave its last sign of life; see `Watchdog`.
        heartbeats: What they said then.
        has_state: It is known with which state of its trial it begins.
        held: The run that left this state in the memory of rank 0's process, if one did.
        has_told: It has told of a checkpoint, since it was to leave if it was.
        progressed: When one of them was known to have come further.
    """

    launch: Launch
    start: float
    calls: RunCalls
    trial: TrialRecord = field(default_factory=TrialRecord)
    has_one_clock: bool = True
    saved: float = field(default_factory=time.monotonic)
    started: float = math.inf
    ended: list[Ended] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)
    causes: list[str] = field(default_factory=list)
    pending_epoch: EndEpoch | None = None
    verdict: BaseException | None = None
    stop_line: StopLine = field(default_factory=StopLine)
    is_movable: bool = False
    has_died: bool = False
    began_anew: str = ""
    will_be_saved: bool = False
    will_linger: bool = False
    leaving: float | None = None
    heard: dict[int, float] = field(default_factory=dict)
    heartbeats: dict[int, Heartbeat] = field(default_factory=dict)
    progressed: float = 0.0
    has_state: bool = False
    held: int | None = None
    has_told: bool = False

    def outcome(self) -> tuple[Any, BaseException | None]:
        """The value that rank 0 returned, or the exception that ended the trial.

        Of several ranks' exceptions the earliest counts: the others are mostly its consequences.
        """
        if self.verdict is not None:
            return None, self.verdict
        all_ended = self._all_ended()
        if not self.causes and (error := parted(all_ended)) is not None:
            return None, error
        raised = [ended for ended in all_ended if ended.ending is not Ending.DISCONNECTED]
        raised = [ended for ended in raised or all_ended if ended.error is not None]
        if raised:
            return None, self._unpacked(self._first(raised))
        if self.causes:
            return None, TrainerLostError(f"Trial {self.launch.number}: {self.cause}.")
        (leader,) = (ended for ended in self.ended if ended.rank == 0)
        if leader.error is not None:  # it alone has lost its peers
            return None, self._unpacked(leader)
        return unpack(leader.value), None

    def _first(self, ended: list[Ended]) -> Ended:
        """The earliest, by their own clock; on several machines there is none for all."""
        return min(ended, key=lambda one: one.time_s) if self.has_one_clock else ended[0]

    def _all_ended(self) -> list[Ended]:
        return [self.calls.at_its_end(ended) for ended in self.ended]

    @property
    def unsaved_s(self) -> float:
        """Seconds since it was last told to make a checkpoint."""
        return time.monotonic() - self.saved

    def fail(self, error: BaseException) -> RunFailed:
        """It ends at once, and its trial with this error."""
        self.verdict = error
        self.heard.clear()
        return RunFailed(run_id=self.launch.run_id)

    def end_rank(self, ended: Ended) -> None:
        """Note how a rank left the objective: there is nothing more to hear of it."""
        self.ended.append(ended)
        self.heard.pop(ended.rank, None)
        if ended.ending is Ending.ABORTED and ended.error is not None:
            self.causes.append(f"device {ended.device} was aborted: {ended.error.description}")

    def lose_rank(self, message: TrainerExited, *, is_killed: bool) -> BaseException | None:
        """A trainer died before its rank had ended; return what its trial fails with, if so."""
        self.lost.add(message.device)
        self.has_died |= not is_killed
        text = f"the trainer of device {message.device} died: {message.cause}"
        if message.out_of_memory and not is_killed and self.verdict is None:
            return OutOfMemoryError(f"Trial {self.launch.number} ran out of memory: {text}.")
        if self.verdict is None and not self.causes:  # else it is for that that they die
            self.causes.append(text)
        return None

    def remaining(self) -> list[int]:
        """The devices whose ranks have not left the objective."""
        over = self.lost.union(ended.device for ended in self.ended)
        return [device for device in self.launch.devices if device not in over]

    @property
    def cause(self) -> str:
        """Why ranks were lost, in words."""
        is_known = self.has_died or any(ended.ending is Ending.RAISED for ended in self.ended)
        consequences = [] if is_known else self._disconnections()
        return "; ".join([*self.causes, *consequences])

    def _disconnections(self) -> list[str]:
        return [
            f"device {ended.device} lost its peers ({ended.error.description})"
            for ended in self.ended
            if ended.ending is Ending.DISCONNECTED and ended.error is not None
        ]

    def flight(self, end: float) -> Flight:
        """The record of this run."""
        usages = [ended.usage for ended in self.ended]
        endings = {ended.ending for ended in self._all_ended()}
        is_lost = bool(self.causes) or endings == {Ending.DISCONNECTED}
        (ending,) = endings if len(endings) == 1 and not self.causes else {Ending.RAISED}
        return Flight(
            devices=self.launch.devices,
            start=self.start,
            end=end,
            round=self.launch.round,
            ending=Ending.LOST.value if is_lost else ending.value,
            probing_s=sum(usage.probing_s for usage in usages) if self.launch.probe else 0.0,
            profiling_s=sum(usage.profiling_s for usage in usages),
            data_wait_s=sum(usage.data_wait_s for usage in usages),
            began_anew=self.began_anew,
        )

    def aborted(self, end: float) -> Flight:
        """The record of this run, if it ends here because the whole call does."""
        return replace(self.flight(end), ending=Ending.ABORTED.value)

    def _unpacked(self, ended: Ended) -> BaseException:
        """The exception, with where it was raised and its traceback there as its cause."""
        assert ended.error is not None
        place = f"in trial {self.launch.number}, rank {ended.rank}, on device {ended.device}"
        error = unpack_error(ended.error)
        error.__cause__ = RemoteTraceback(f"\n{place}:\n{ended.error.traceback.rstrip()}")
        return error
