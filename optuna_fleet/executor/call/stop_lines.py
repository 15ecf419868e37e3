"""Where runs stop within an epoch: to leave their devices, or to be saved, every `interval_s`.

Their ranks are asked for their steps, and told at which one all are to stop. A run that was not
saved for `interval_s` is saved at the next place where all its ranks can be: the end of an epoch,
or a step of `movable` batches.
"""

from __future__ import annotations

import time
from functools import partial

from optuna_fleet.executor.call.runs import RunRecord
from optuna_fleet.executor.call.sweep import Sweep
from optuna_fleet.wire.messages import AskStep, Place, StopAt


def ask(sweep: Sweep, run: RunRecord, *, saves: bool = False, stays: bool = False) -> None:
    """Have a run be saved, or leave its devices; see `StopLine`."""
    own = run.launch.devices
    ranks = [own.index(device) for device in run.remaining()]
    for rank in run.stop_line.ask(ranks, saves=saves, stays=stays):
        sweep.runtime.send(own[rank], AskStep(run_id=run.launch.run_id, rank=rank))


def at_step(sweep: Sweep, run: RunRecord, rank: int, place: Place = (0, 0, 0)) -> None:
    """A rank is at this place, or has left; once that is known of all, they are to stop."""
    if (place_of_all := run.stop_line.take(rank, place)) is None:
        return
    line, run_id = run.stop_line, run.launch.run_id
    order = StopAt(run_id=run_id, place=place_of_all, saves=line.saves, stays=line.stays)
    for device in run.remaining():
        sweep.runtime.send(device, order)
    save_in_time(sweep, run)


def takes_checkpoint(sweep: Sweep, run: RunRecord) -> bool:
    """Whether a run that can make a checkpoint now is to; it is told so."""
    is_due = run.unsaved_s >= sweep.job.options.checkpoints.interval_s
    if is_due:
        run.saved = time.monotonic()
    return is_due


def save_in_time(sweep: Sweep, run: RunRecord) -> None:
    """See to it that a run is saved within its epoch, if that is due first."""
    if run.is_movable and not run.will_be_saved:
        run.will_be_saved = True
        interval_s = sweep.job.options.checkpoints.interval_s
        sweep.later_of(interval_s - run.unsaved_s, run, partial(_save, sweep))


def _save(sweep: Sweep, run: RunRecord) -> None:
    run.will_be_saved = False
    if run.stop_line.is_asked or not run.remaining():
        return  # once all have told where they are, `save_in_time` follows
    if takes_checkpoint(sweep, run):
        ask(sweep, run, saves=True)
    else:
        save_in_time(sweep, run)
