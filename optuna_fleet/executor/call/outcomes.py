"""What becomes of trials: converged or not at an epoch's end, done, run again, given back."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from optuna_fleet.events import EpochEnded, Event, ProposalsExhausted
from optuna_fleet.exceptions import StorageLostError, TrainerLostError
from optuna_fleet.executor.call.runs import RunRecord
from optuna_fleet.executor.call.sweep import Sweep
from optuna_fleet.executor.given import Options
from optuna_fleet.sampler_bridge.compat import fleet_logger
from optuna_fleet.sampler_bridge.ledger import Ledger
from optuna_fleet.wire.calls import EndEpoch


def propose(sweep: Sweep, *, again: bool = False) -> list[Event]:
    """Ask the study for trials; if that fails, there are no more.

    If `again`, only if it was asked before, and had none yet.

    Raises:
        StorageLostError: The storage is lost.
    """
    try:
        return sweep.proposals.next_events(again=again)
    except Exception as error:
        _fail(sweep, error)
        return [ProposalsExhausted()]


def run_again(sweep: Sweep, run: RunRecord) -> None:
    """A trial goes on with another run."""
    number = run.launch.number
    # Also where nothing was lost: its checkpoint may turn out to be damaged.
    sweep.ledger.note_restart(number)
    if run.cause:
        has_one = number in sweep.retention.folder.unfinished()
        where = "last checkpoint." if has_one else "beginning: it had no checkpoint yet."
        fleet_logger.warning(f"Trial {number}: {run.cause}. It is run again from its {where}")


def give_up(sweep: Sweep, run: RunRecord, restarts: int) -> None:
    """A trial has lost its devices too often: it fails."""
    number = run.launch.number
    error = TrainerLostError(
        f"Trial {number} lost its devices {restarts} times without coming further, the last "
        f"time because {run.cause}."
    )
    finish(sweep, number, None, error)


def finish(sweep: Sweep, number: int, value: Any, error: BaseException | None) -> None:
    """A trial is done: tell how it has ended."""
    try:
        sweep.ledger.settle(number, value, error)
    except BaseException as raised:
        if raised is not error and not isinstance(raised, Exception):
            raise  # Ctrl-C, and not the objective's own
        if raised is error:
            raised.with_traceback(None)  # where it was told says nothing
        _fail(sweep, raised)
    sweep.retention.settled(number)
    del sweep.trials[number]  # until then Ctrl-C finds it


def _fail(sweep: Sweep, error: BaseException) -> None:
    """Start nothing more.

    Raises:
        StorageLostError: It is that: nothing can be told any more.
    """
    if isinstance(error, StorageLostError):
        raise error
    sweep.failure = sweep.failure or error
    sweep.proposals.stop()


def end_all(sweep: Sweep, error: BaseException) -> None:
    """Fail the trials that were launched, give back the others; record where those flew."""
    ledger, proposals = sweep.ledger, sweep.proposals
    launched = {number for number, trial in sweep.trials.items() if trial.was_launched}
    ledger.abandon(sorted(launched.intersection(proposals.unfinished())), error)
    for number in proposals.unfinished():
        with contextlib.suppress(StorageLostError):
            proposals.return_to_queue(number)
    with contextlib.suppress(Exception):  # the storage may be what has failed
        for run in sweep.runs.values():
            ledger.records.flight(run.launch.number, run.aborted(end=time.time()))


class EpochEvaluator:
    """Asks the user's convergence criterion and predictor about the trials of one call."""

    def __init__(self, options: Options, ledger: Ledger, *, maximize: bool | None) -> None:
        self._convergence = options.convergence
        self._predictor = options.predictor
        self._maximize = maximize
        self._ledger = ledger
        self._has_complained = False

    def epoch_ended(self, number: int, call: EndEpoch) -> EpochEnded:
        """The event that a trial has done another epoch."""
        return EpochEnded(
            run_id=call.run_id,
            epochs_done=call.epoch + 1,
            converged=self.has_converged(number, call.last_step),
            predicted_epochs=self._predicted_epochs(number),
        )

    def has_converged(self, number: int, last_step: int | None) -> bool:
        """Whether a trial ends here, having come to its report of that step."""
        if self._convergence is None or self._maximize is None:
            return False
        values = self._ledger.reported_values(number, last_step)
        return self._convergence.is_reached(values, maximize=self._maximize)

    def _predicted_epochs(self, number: int) -> float | None:
        """A predictor that fails is as good as none: it only ever helps to plan."""
        if self._predictor is None:
            return None
        try:
            predicted = self._predictor(self._ledger.frozen(number))
            return None if predicted is None else float(predicted)
        except Exception as error:
            if not self._has_complained:
                self._has_complained = True
                fleet_logger.warning(
                    f"The predictor failed for trial {number}, and is passed over where it does: "
                    f"{type(error).__name__}: {error}"
                )
            return None
