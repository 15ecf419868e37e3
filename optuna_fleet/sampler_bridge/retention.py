"""Which checkpoints are kept: those of trials under way, and of the best that are done."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import optuna
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from optuna_fleet.checkpoints.folder import StudyFolder
from optuna_fleet.sampler_bridge import compat
from optuna_fleet.sampler_bridge.patience import Patience


class CheckpointRetention:
    """Keeps the final checkpoints of the best `num_kept` trials of a study that have left one.

    With several objectives these are the latest of the Pareto front. The worst of them are removed
    until the others have at most `max_bytes` in all.
    """

    def __init__(
        self,
        study: optuna.Study,
        folder: StudyFolder,
        num_kept: int,
        max_bytes: int | None = None,
        patiently: Patience | None = None,
    ) -> None:
        self._study = study
        self._patiently = patiently or Patience(study, 0.0)
        self.folder = folder
        self._num_kept = num_kept
        self._max_bytes = max_bytes
        self._has_warned = False
        self._left = folder.finals()  # by earlier calls, and then by trials of this one

    def left(self, number: int, run: str) -> None:
        """The last run of a trial was this one: keep what it has left, for the time being."""
        if self.folder.left(number, run):
            self._left.add(number)

    def drop(self, number: int) -> None:
        """Remove all of a trial."""
        self.folder.drop(number)
        self._left.discard(number)

    @property
    def keeps_any(self) -> bool:
        """Whether trials that are done leave checkpoints at all."""
        return self._num_kept > 0

    def is_among_best(self, value: Any) -> bool:
        """Whether a trial whose objective has returned `value` should leave a checkpoint."""
        if not self.keeps_any or len(self._study.directions) > 1:
            return self.keeps_any
        try:
            key = self._sign * float(value)
        except (TypeError, ValueError):
            return False
        if math.isnan(key):
            return False
        rivals = self._ranked(self._trials(self._left))[: self._num_kept]
        # Whether the new one keeps its constraints is not known yet.
        is_open = len(rivals) < self._num_kept or any(trial.constraints for trial in rivals)
        return is_open or key <= self._key(rivals[-1])[1]

    def settled(self, number: int) -> None:
        """The study was told how a trial ended: remove what is not kept any more."""
        self.folder.drop_unfinished(number)
        trials = self._trials(self._left)
        best = self._within_bytes(self._ranked(trials)[: self._num_kept])
        for trial in trials:
            # One that is RUNNING has just left its checkpoint and will be told in a moment.
            if trial.state.is_finished() and trial not in best:
                self.drop(trial.number)

    def _within_bytes(self, best: list[FrozenTrial]) -> list[FrozenTrial]:
        """The first of these, as many as may be kept, less those that are too large alone."""
        if self._max_bytes is None:
            return best
        sizes = {trial.number: self.folder.final_bytes(trial.number) for trial in best}
        fitting = [trial for trial in best if sizes[trial.number] <= self._max_bytes]
        if fitting[:1] != best[:1] and not self._has_warned:
            self._has_warned = True
            number = best[0].number
            compat.fleet_logger.warning(
                f"Trial {number} is the best so far, but its checkpoint is not kept: it has "
                f"{sizes[number]} bytes, and `max_bytes` is {self._max_bytes}."
            )
        totals = itertools.accumulate(sizes[trial.number] for trial in fitting)
        return fitting[: sum(total <= self._max_bytes for total in totals)]

    def _trials(self, numbers: Iterable[int]) -> list[FrozenTrial]:
        wanted = set(numbers)
        trials = self._patiently(lambda: compat.trials_of(self._study)) if wanted else []
        return [trial for trial in trials if trial.number in wanted]

    def _ranked(self, trials: list[FrozenTrial]) -> list[FrozenTrial]:
        """The completed ones of these, best first; what Optuna calls the best comes first."""
        complete = [trial for trial in trials if trial.state is TrialState.COMPLETE]
        if len(complete) < 2:  # to find the best, Optuna copies all trials of the study
            return complete
        best = {trial.number for trial in self._patiently(self._optunas_best)}
        if len(self._study.directions) > 1:
            return sorted(complete, key=lambda trial: (trial.number not in best, -trial.number))
        return sorted(complete, key=lambda trial: (trial.number not in best, *self._key(trial)))

    def _optunas_best(self) -> list[FrozenTrial]:
        if len(self._study.directions) > 1:
            return self._study.best_trials
        try:
            return [self._study.best_trial]
        except ValueError:  # there is none
            return []

    def _key(self, trial: FrozenTrial) -> tuple[bool, float]:
        is_infeasible = any(value > 0 for value in trial.constraints.values())
        return is_infeasible, self._sign * (trial.value or 0.0)

    @property
    def _sign(self) -> float:
        return -1.0 if self._study.direction is StudyDirection.MAXIMIZE else 1.0
