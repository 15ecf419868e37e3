"""Where runs stop within an epoch: to leave their devices, or to be saved, every `interval_s`."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

from optuna_fleet.executor.call.runs import RunRecord
from optuna_fleet.wire.messages import AskStep, Place, StopAt


class StopLines:
    """Asks the ranks of runs for their steps, and tells them at which one all are to stop.

    A run is saved that was not for `interval_s`, at the next place where all its ranks can: the
    end of an epoch, or a step of `movable` batches.

    Args:
        send: Sends a message to the trainer of a device.
        later: Has something called so many seconds from now, until the run has ended.
    """

    def __init__(
        self,
        interval_s: float,
        send: Callable[[int, Any], None],
        later: Callable[[float, RunRecord, Callable[[RunRecord], None]], None],
    ) -> None:
        self._interval_s = interval_s
        self._send = send
        self._later = later

    def interrupt(self, run: RunRecord, devices: Collection[int]) -> None:
        """Have a run leave its devices, as its trial is about to get these."""
        self._ask(run, saves=False, stays=run.launch.devices[0] in devices)

    def at_step(self, run: RunRecord, rank: int, place: Place = (0, 0, 0)) -> None:
        """A rank is at this place, or has left; once that is known of all, they are to stop."""
        if (place_of_all := run.stop_line.take(rank, place)) is None:
            return
        line, run_id = run.stop_line, run.launch.run_id
        order = StopAt(run_id=run_id, place=place_of_all, saves=line.saves, stays=line.stays)
        for device in run.remaining():
            self._send(device, order)
        self.save_in_time(run)

    def takes_checkpoint(self, run: RunRecord) -> bool:
        """Whether a run that can make a checkpoint now is to; it is told so."""
        is_due = run.unsaved_s >= self._interval_s
        if is_due:
            run.saved = time.monotonic()
        return is_due

    def save_in_time(self, run: RunRecord) -> None:
        """See to it that a run is saved within its epoch, if that is due first."""
        if run.is_movable and not run.will_be_saved:
            run.will_be_saved = True
            self._later(max(0.0, self._interval_s - run.unsaved_s), run, self._save)

    def _save(self, run: RunRecord) -> None:
        run.will_be_saved = False
        if run.stop_line.is_asked or not run.remaining():
            return  # once all have told where they are, `save_in_time` follows
        if self.takes_checkpoint(run):
            self._ask(run, saves=True, stays=False)
        else:
            self.save_in_time(run)

    def _ask(self, run: RunRecord, *, saves: bool, stays: bool) -> None:
        own = run.launch.devices
        ranks = [own.index(device) for device in run.remaining()]
        for rank in run.stop_line.ask(ranks, saves=saves, stays=stays):
            self._send(own[rank], AskStep(run_id=run.launch.run_id, rank=rank))
