"""When runs make checkpoints: unsaved for `interval_s`, at the next place where all ranks can.

That is the end of an epoch, or a step of `movable` batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from optuna_fleet.executor.call.runs import RunRecord


class Saves:
    """Of the runs of one call.

    Args:
        save: Has a run make a checkpoint within its epoch.
    """

    def __init__(
        self, interval_s: float, runs: Mapping[int, RunRecord], save: Callable[[RunRecord], None]
    ) -> None:
        self._interval_s = interval_s
        self._runs = runs
        self._save = save

    def take_due(self, run: RunRecord) -> bool:
        """Whether a run that can make a checkpoint now is to; it is told so."""
        is_due = run.unsaved_s >= self._interval_s
        if is_due:
            run.saved = time.monotonic()
        return is_due

    def save_within_epochs(self) -> None:
        """Have those make a checkpoint that are due, and read what they can stop in."""
        for run in self._stoppable():
            if self.take_due(run):
                self._save(run)

    def waits_s(self) -> list[float]:
        """Seconds until `save_within_epochs` has more to do."""
        return [self._interval_s - run.unsaved_s for run in self._stoppable()]

    def _stoppable(self) -> list[RunRecord]:
        runs = [run for run in self._runs.values() if run.is_movable and run.remaining()]
        return [run for run in runs if not run.stop_line.is_asked]
