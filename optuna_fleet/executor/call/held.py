"""What trials have left that are between two runs: in whose memory, and in which checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from optuna_fleet.events import CheckpointSaved, Launch
from optuna_fleet.executor.call.runs import RunRecord
from optuna_fleet.wire.messages import CheckpointFailed, Ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A launch that can be carried out.

    Attributes:
        launch: Which; `devices` in the order of the ranks.
        held: The run whose state is in the memory of rank 0's process.
        saved: The checkpoint that this run goes on with, if the controller has not heard of it.
    """

    launch: Launch
    held: int | None = None
    saved: CheckpointSaved | None = None


@dataclass(slots=True, kw_only=True)
class _Left:
    """What a trial's last run has left.

    Attributes:
        run_id: Of that run.
        device: Of its rank 0, whose process writes the checkpoint.
        holds: That process has the state in memory too.
        is_pending: Nobody has told yet whether the checkpoint is written.
        saved: It is, which the controller has not heard.
        due: The launch that waits for it.
        follower: The run that has gone on with it.
    """

    run_id: int
    device: int
    is_pending: bool
    holds: bool = True
    saved: CheckpointSaved | None = None
    due: Launch | None = None
    follower: int | None = None


class HeldStates:
    """Has trials go on with the state that their last run has left.

    A process holds a state until it begins another run, but writes it to the end. So a trial that
    goes on elsewhere waits until it is known whether the checkpoint is written.

    Args:
        runs: Those that have not ended on all their devices, by run id.
    """

    def __init__(self, runs: Mapping[int, RunRecord]) -> None:
        self._runs = runs
        self._left: dict[int, _Left] = {}  # by trial
        self._told: set[int] = set()  # runs, since they were to leave

    # -- what runs leave --------------------------------------------------------------------------

    def leaves(self, run_id: int) -> None:
        """The next checkpoint that the run tells of is the one that it leaves with."""
        self._told.discard(run_id)

    def rank_ended(self, run: RunRecord, ended: Ended) -> None:
        """A rank has ended; if it is rank 0, its process may hold the state."""
        if ended.rank > 0:
            return
        run_id = run.launch.run_id
        if ended.holds:
            self._left[run.launch.number] = _Left(
                run_id=run_id,
                device=ended.device,
                is_pending=run_id not in self._told,
            )
        self._told.discard(run_id)

    def trial_of(self, run_id: int) -> int | None:
        """The trial whose last run this was; None if it is done, or another was since."""
        return next((n for n, left in self._left.items() if left.run_id == run_id), None)

    def take(self, message: CheckpointSaved | CheckpointFailed) -> Start | CheckpointSaved | None:
        """A checkpoint is written, or can't be.

        Returns:
            What begins with it, or what is to be told of the run that goes on with it.
        """
        if message.run_id in self._runs:
            self._told.add(message.run_id)
        saved = message if isinstance(message, CheckpointSaved) else None
        for left in self._left.values():
            if left.follower == message.run_id and saved is not None:
                left.is_pending = False  # this one is newer
            elif left.run_id == message.run_id and left.is_pending:
                left.is_pending = False
                return self._written(left, saved)
        return None

    def _written(
        self, left: _Left, saved: CheckpointSaved | None
    ) -> Start | CheckpointSaved | None:
        if left.run_id in self._runs:  # it is told of as that run's
            return None
        left.saved = saved
        if left.due is not None:
            return self._start(left, left.due)
        if saved is None or left.follower is None or left.follower not in self._runs:
            return None
        left.saved = None
        return replace(saved, run_id=left.follower)

    def device_lost(self, device: int) -> list[Start]:
        """A trainer has died, with what it held and wrote; return what does not wait any more."""
        starts = []
        for left in self._left.values():
            if left.due is not None and device in left.due.devices:
                left.due = None  # no run begins where a trainer is missing
            if left.device == device:
                left.holds, left.is_pending = False, False
                if left.due is not None:
                    starts.append(self._start(left, left.due))
        return starts

    def forget(self, number: int) -> None:
        """The trial is done."""
        self._left.pop(number, None)

    # -- launches ---------------------------------------------------------------------------------

    def begin(self, launch: Launch) -> Start | None:
        """Return how to carry out a launch; None if that comes later."""
        for number, other in self._left.items():
            other.holds &= number == launch.number or other.device not in launch.devices
        left = self._left.get(launch.number)
        if left is None:
            return Start(launch=launch)
        if left.holds and left.device in launch.devices:
            others = (device for device in launch.devices if device != left.device)
            launch = replace(launch, devices=(left.device, *others))
            return self._start(left, launch, held=left.run_id)
        if left.is_pending:
            left.due = launch
            return None
        return self._start(left, launch)

    def _start(self, left: _Left, launch: Launch, held: int | None = None) -> Start:
        saved, left.saved, left.due = left.saved, None, None
        left.holds, left.follower = False, launch.run_id
        if saved is None:
            return Start(launch=launch, held=held)
        saved = replace(saved, run_id=launch.run_id)
        launch = replace(launch, checkpoint=saved.location)
        return Start(launch=launch, held=held, saved=saved)
