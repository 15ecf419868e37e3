"""Trials that stop within an epoch, and go on where some of their ranks wait.

Ranks that join rehearse meanwhile: they run the objective's beginning. Those that can do so while
the others still train are waited for before these stop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from optuna_fleet.events import CheckpointSaved, Launch
from optuna_fleet.executor.call.runs import RunRecord
from optuna_fleet.wire.calls import Reply
from optuna_fleet.wire.messages import (
    AskStep,
    CheckpointFailed,
    Ended,
    Place,
    Rehearsed,
    Release,
    StopAt,
)

Answers = dict[int, tuple[str, Reply]]


@dataclass(slots=True, kw_only=True)
class _Stopped:
    """A run that has stopped.

    Attributes:
        run: Which.
        ranks: Those that wait, by device.
        can_join: Other ranks can join these.
        saving: The device whose rank writes a checkpoint, as the run can't go on where it is.
        is_written: That rank has, or never will.
        saved: What it has written.
        due: The launch that waits, for that or for who joins.
    """

    run: RunRecord
    ranks: dict[int, int] = field(default_factory=dict)
    can_join: bool = True
    saving: int | None = None
    is_written: bool = False
    saved: CheckpointSaved | None = None
    due: Launch | None = None

    @property
    def run_id(self) -> int:
        return self.run.launch.run_id


@dataclass(slots=True, kw_only=True)
class _Rehearsal:
    """Of the beginning of a trial, to join the run that it `follows`.

    `is_ready` is None while it is under way; and false if it has failed.
    """

    order: int
    number: int
    follows: int
    is_ready: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A launch that can be carried out.

    Attributes:
        launch: Which; `devices` in the order of the ranks.
        follows: The run that goes on there, if it does.
        num_stay: The first ranks, which wait there.
        beginning: What the objective has called at its beginning.
        saved_at: When that run's trial was last told to make a checkpoint, by the monotonic clock.
        saved: The checkpoint to begin with, of which the controller has not heard.
    """

    launch: Launch
    follows: int | None = None
    num_stay: int = 0
    beginning: Answers = field(default_factory=dict)
    saved_at: float | None = None
    saved: CheckpointSaved | None = None


class Handovers:
    """Knows which ranks wait, and who must write a checkpoint before anything is lost.

    Args:
        rehearse: Orders the last device of a launch to rehearse, to join the run of this id.
        call_off: Forgets an order to rehearse, if it was not sent.
    """

    _orders = count(-1, -1)  # of all calls: what is left of one is not taken for another's

    def __init__(
        self,
        send: Callable[[int, Any], None],
        rehearse: Callable[[Launch, int, Answers], None],
        call_off: Callable[[int], None],
    ) -> None:
        self._send = send
        self._rehearse = rehearse
        self._call_off = call_off
        self._stopped: dict[int, _Stopped] = {}  # by trial
        self._rehearsals: dict[int, _Rehearsal] = {}  # by device
        self._asked: dict[int, tuple[RunRecord, tuple[int, ...]]] = {}  # by run
        self._going: set[int] = set()  # devices that will be gone soon

    # -- before a run stops -----------------------------------------------------------------------

    def interrupt(self, run: RunRecord, devices: Collection[int], busy: Collection[int]) -> None:
        """Have a run stop, as its trial is to have these devices.

        Once those that are to join it are ready, on devices where no run is `busy`.
        """
        own = run.launch.devices
        stays = tuple(rank for rank, device in enumerate(own) if device in devices)
        waiting = {device for stopped in self._stopped.values() for device in stopped.ranks}
        for device in devices if stays else ():
            if device not in busy and device not in waiting:
                self._begin_rehearsal(run, devices, device)
        self._asked[run.launch.run_id] = run, stays
        self._ask(run.launch.run_id)

    def _ask(self, run_id: int) -> None:
        ready = [r.is_ready for r in self._rehearsals.values() if r.follows == run_id]
        if run_id in self._asked and None not in ready:
            run, stays = self._asked.pop(run_id)
            run.stays = stays if all(ready) else ()
            self._ask_ranks(run, saves=False)

    def save(self, run: RunRecord) -> None:
        """Have a run make a checkpoint at the next step that all its ranks come to."""
        self._ask_ranks(run, saves=True)

    def _ask_ranks(self, run: RunRecord, *, saves: bool) -> None:
        run.stop_line.saves = saves
        if run.stop_line.is_asked:  # what they tell serves for both
            return
        own, run_id = run.launch.devices, run.launch.run_id
        run.stop_line.ask(own.index(device) for device in run.remaining())
        for device in run.remaining():
            self._send(device, AskStep(run_id=run_id, rank=own.index(device)))

    def at_step(self, run: RunRecord, rank: int, place: Place = (0, 0, 0)) -> None:
        """A rank is at this place, or has left; once that is known of all, they are to stop."""
        if (line := run.stop_line.take(rank, place)) is not None:
            saves = run.stop_line.saves
            stays = () if saves else run.stays
            order = StopAt(run_id=run.launch.run_id, place=line, stays=stays, saves=saves)
            for device in run.remaining():
                self._send(device, order)

    def _begin_rehearsal(self, run: RunRecord, devices: Collection[int], device: int) -> None:
        self._leave_rehearsal(device)
        launch, order = run.launch, next(self._orders)
        self._rehearsals[device] = _Rehearsal(
            order=order, number=launch.number, follows=launch.run_id
        )
        others = (other for other in devices if other != device)
        launch = replace(launch, run_id=order, devices=(*others, device), checkpoint=None)
        self._rehearse(launch, run.launch.run_id, run.calls.beginning)

    def _leave_rehearsal(self, device: int) -> None:
        """None is needed there any more."""
        if (rehearsal := self._rehearsals.pop(device, None)) is not None:
            self._call_off(rehearsal.order)
            self._send(device, Release(run_id=rehearsal.order, saves=False))
            self._ask(rehearsal.follows)

    def rehearsed(self, message: Rehearsed) -> Iterator[Start]:
        """A rehearsal is done, or has failed."""
        rehearsal = self._rehearsals.get(message.device)
        if rehearsal is not None and rehearsal.order == message.run_id:
            rehearsal.is_ready = message.is_ready
            self._ask(rehearsal.follows)
            yield from self._advance(rehearsal.number)

    # -- what happens -----------------------------------------------------------------------------

    def rank_ended(self, run: RunRecord, ended: Ended) -> None:
        """A rank has ended, and waits if it says so."""
        self.at_step(run, ended.rank)
        number = run.launch.number
        if not ended.waits and number not in self._stopped:
            return
        stopped = self._stopped.setdefault(number, _Stopped(run=run))
        if stopped.saving is not None:  # the others were told to leave before it had ended
            self._release(stopped, ended.device)
            stopped.is_written |= stopped.saving == ended.device and not ended.waits
        elif ended.waits:
            stopped.ranks[ended.device] = ended.rank
            stopped.can_join &= ended.can_join
        self._save_what_goes(stopped)

    def leaving(self, devices: Collection[int]) -> None:
        """These devices will be gone soon."""
        self._going.update(devices)
        for stopped in self._stopped.values():
            self._save_what_goes(stopped)

    def _save_what_goes(self, stopped: _Stopped) -> None:
        """Nobody else is there who could write a checkpoint later."""
        own, late = stopped.run.launch.devices, stopped.run.remaining()
        coming = {own[rank] for rank in stopped.run.stays}.intersection(late)
        if stopped.ranks and self._going.issuperset(stopped.ranks.keys() | coming):
            self._save(stopped)

    def device_lost(self, device: int) -> Iterator[Start]:
        """A trainer has died; what waited for it alone begins."""
        self._going.discard(device)
        if (rehearsal := self._rehearsals.pop(device, None)) is not None:
            self._ask(rehearsal.follows)
        for number, stopped in list(self._stopped.items()):
            stopped.ranks.pop(device, None)
            if stopped.due is not None and device in stopped.due.devices:
                stopped.due = None  # no run begins where a trainer is missing
            if stopped.saving == device:
                yield from self._written(number)
            elif not stopped.ranks and stopped.saving is None:
                del self._stopped[number]

    def take(self, message: CheckpointSaved | CheckpointFailed) -> Iterator[Start]:
        """A rank has written a checkpoint, or failed to."""
        for number, stopped in list(self._stopped.items()):
            if stopped.run_id == message.run_id and stopped.saving is not None:
                stopped.saved = message if isinstance(message, CheckpointSaved) else None
                yield from self._written(number)

    def _written(self, number: int) -> Iterator[Start]:
        """Nobody writes any more."""
        self._stopped[number].is_written = True
        self._stopped[number].ranks.clear()
        yield from self._advance(number)

    def forget(self, number: int) -> None:
        """The trial is done."""
        if (stopped := self._stopped.pop(number, None)) is not None:
            for device in stopped.ranks:
                self._release(stopped, device)
        self._leave_rehearsals(number)

    def _leave_rehearsals(self, number: int) -> None:
        for device in [d for d, one in self._rehearsals.items() if one.number == number]:
            self._leave_rehearsal(device)

    def end(self) -> None:
        """The call is over."""
        for number in [*self._stopped, *{one.number for one in self._rehearsals.values()}]:
            self.forget(number)

    # -- launches ---------------------------------------------------------------------------------

    def begin(self, launch: Launch) -> Start | None:
        """Return how to carry out a launch; None if that comes later."""
        for number, other in self._stopped.items():
            if number != launch.number and not other.ranks.keys().isdisjoint(launch.devices):
                self._save(other)
        for device in launch.devices:
            if device in self._rehearsals and self._rehearsals[device].number != launch.number:
                self._leave_rehearsal(device)
        if launch.number not in self._stopped:
            self._leave_rehearsals(launch.number)
            return Start(launch=launch)
        self._stopped[launch.number].due = launch
        return next(self._advance(launch.number), None)

    def _advance(self, number: int) -> Iterator[Start]:
        """Carry out the launch that is due, if it can be; or do what it needs."""
        stopped = self._stopped.get(number)
        if stopped is None or (launch := stopped.due) is None:
            return
        if stopped.saving is None:
            stay = sorted(stopped.ranks.keys() & launch.devices, key=stopped.ranks.__getitem__)
            is_ready = self._are_ready(stopped, launch) if stay else False
            if is_ready:
                yield self._joined(stopped, launch, stay)
            if is_ready is not False:
                return
            self._save(stopped)
        if not stopped.is_written:
            return
        self._leave_rehearsals(number)
        del self._stopped[number]
        saved = stopped.saved
        if saved is not None:
            saved = replace(saved, run_id=launch.run_id)
            launch = replace(launch, checkpoint=saved.location)
        yield Start(launch=launch, saved=saved)

    def _are_ready(self, stopped: _Stopped, launch: Launch) -> bool | None:
        """Whether all have rehearsed that are to join; None while some do."""
        new = [device for device in launch.devices if device not in stopped.ranks]
        if new and not stopped.can_join:
            return False
        for device in new:
            known = self._rehearsals.get(device)
            if known is None or known.follows != stopped.run_id:
                self._begin_rehearsal(stopped.run, launch.devices, device)
        ready = {self._rehearsals[device].is_ready for device in new}
        return False if False in ready else None if None in ready else True

    def _joined(self, stopped: _Stopped, launch: Launch, stay: list[int]) -> Start:
        new = [device for device in launch.devices if device not in stopped.ranks]
        for device in new:
            del self._rehearsals[device]
        self._let_go(stopped, launch)
        return Start(
            launch=replace(launch, devices=(*stay, *new)),
            follows=stopped.run_id,
            num_stay=len(stay),
            beginning=stopped.run.calls.beginning,
            saved_at=stopped.run.saved,
        )

    def _let_go(self, stopped: _Stopped, launch: Launch) -> None:
        """The launch goes on with what is on its devices: nothing else is needed."""
        del self._stopped[launch.number]
        self._leave_rehearsals(launch.number)
        for device in stopped.ranks.keys() - set(launch.devices):
            self._release(stopped, device)

    def _save(self, stopped: _Stopped) -> None:
        """Have the first rank write a checkpoint, and all leave, as soon as they have stopped."""
        if stopped.saving is not None:
            return
        own, late = stopped.run.launch.devices, stopped.run.remaining()
        waiting = {rank for rank in stopped.run.stays if own[rank] in late}
        waiting.update(stopped.ranks.values())
        stopped.saving = own[min(waiting)]
        for device in stopped.ranks:
            self._release(stopped, device)

    def _release(self, stopped: _Stopped, device: int) -> None:
        saves = device == stopped.saving
        self._send(device, Release(run_id=stopped.run_id, saves=saves))
