"""Where runs stop within an epoch, to leave their devices or to be saved."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from optuna_fleet.executor.call.runs import RunRecord
from optuna_fleet.wire.messages import AskStep, Place, StopAt


class StopLines:
    """Asks the ranks of runs for their steps, and tells them at which one all are to stop."""

    def __init__(self, send: Callable[[int, Any], None]) -> None:
        self._send = send

    def interrupt(self, run: RunRecord, devices: Collection[int]) -> None:
        """Have a run leave its devices, as its trial is about to get these."""
        self._ask(run, saves=False, stays=run.launch.devices[0] in devices)

    def save(self, run: RunRecord) -> None:
        """Have a run make a checkpoint at the next step that all its ranks come to."""
        self._ask(run, saves=True, stays=False)

    def _ask(self, run: RunRecord, *, saves: bool, stays: bool) -> None:
        own = run.launch.devices
        ranks = [own.index(device) for device in run.remaining()]
        for rank in run.stop_line.ask(ranks, saves=saves, stays=stays):
            self._send(own[rank], AskStep(run_id=run.launch.run_id, rank=rank))

    def at_step(self, run: RunRecord, rank: int, place: Place = (0, 0, 0)) -> None:
        """A rank is at this place, or has left; once that is known of all, they are to stop."""
        if (place_of_all := run.stop_line.take(rank, place)) is None:
            return
        line, run_id = run.stop_line, run.launch.run_id
        order = StopAt(run_id=run_id, place=place_of_all, saves=line.saves, stays=line.stays)
        for device in run.remaining():
            self._send(device, order)
