"""What becomes of the trials of a call that breaks off."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable

from optuna_fleet.exceptions import StorageLostError
from optuna_fleet.executor.runs import RunRecord
from optuna_fleet.sampler_bridge.ledger import Ledger
from optuna_fleet.sampler_bridge.proposals import Proposals


def end_all(
    ledger: Ledger,
    proposals: Proposals,
    launched: set[int],
    runs: Iterable[RunRecord],
    error: BaseException,
) -> None:
    """Fail the trials that were launched, give back the others, record where the former flew."""
    ledger.abandon(sorted(launched.intersection(proposals.unfinished())), error)
    for number in proposals.unfinished():
        with contextlib.suppress(StorageLostError):
            proposals.return_to_queue(number)
    with contextlib.suppress(Exception):  # the storage may be what has failed
        for run in runs:
            ledger.record(run.launch.number, run.aborted(end=time.time()))
