"""One `optimize` call as the study sees it: budget, loop flag, progress bar, records."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

import optuna

from optuna_fleet.sampler_bridge import compat
from optuna_fleet.sampler_bridge.ledger import Callback, Ledger
from optuna_fleet.sampler_bridge.proposals import Proposals


class Loop:
    """Context of one call; `proposals` and `ledger` are usable in it. Arguments as in Optuna."""

    def __init__(
        self,
        study: optuna.Study,
        *,
        n_trials: int | None,
        timeout: float | None,
        catch: tuple[type[Exception], ...],
        callbacks: Iterable[Callback] | None,
        gc_after_trial: bool,
        show_progress_bar: bool,
    ) -> None:
        self.study = study
        self.gc_after_trial = gc_after_trial
        self._budget = (n_trials, timeout)
        self._show_progress_bar = show_progress_bar
        self._catch = catch
        self._callbacks = callbacks

    @property
    def maximize(self) -> bool:
        """Whether larger values of a (single) objective are better."""
        return self.study.directions[0] is optuna.study.StudyDirection.MAXIMIZE

    def __enter__(self) -> Loop:
        compat.enter_loop(self.study)
        try:
            self._progress_bar = compat.ProgressBar(self._show_progress_bar, *self._budget)
            self.proposals = Proposals(self.study, *self._budget)
            self.ledger = Ledger(
                self.study,
                self.proposals,
                catch=self._catch,
                callbacks=self._callbacks,
                gc_after_trial=self.gc_after_trial,
                progress_bar=self._progress_bar,
            )
        except BaseException:
            compat.leave_loop(self.study)
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress_bar.close()
        compat.leave_loop(self.study)
