"""One `optimize` call as the study sees it: budget, loop flag, progress bar, records."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

import optuna
from optuna.study import StudyDirection

from optuna_fleet.checkpoints.folder import FolderLock, StudyFolder
from optuna_fleet.sampler_bridge import compat
from optuna_fleet.sampler_bridge.ledger import Callback, Ledger
from optuna_fleet.sampler_bridge.ownership import TrialOwnership
from optuna_fleet.sampler_bridge.privacy import keep_to_ourselves
from optuna_fleet.sampler_bridge.proposals import Proposals
from optuna_fleet.sampler_bridge.retrying_storage import retry_storage, stop_retrying


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
        storage_patience_s: float = 300.0,
        folder: StudyFolder | None = None,
        lock: FolderLock | None = None,
    ) -> None:
        self.study = study
        self._lock = lock
        self._folder = folder
        self._ownership: TrialOwnership | None = None
        self._storage_patience_s = storage_patience_s
        self.gc_after_trial = gc_after_trial
        self._budget = (n_trials, timeout)
        self._show_progress_bar = show_progress_bar
        self._catch = catch
        self._callbacks = callbacks

    @property
    def maximize(self) -> bool | None:
        """Whether larger values are better; None where there are several objectives."""
        directions = self.study.directions
        return directions[0] is StudyDirection.MAXIMIZE if len(directions) == 1 else None

    def __enter__(self) -> Loop:
        compat.enter_loop(self.study)
        retry_storage(self.study, self._storage_patience_s)
        try:
            keep_to_ourselves(self.study)
            self._progress_bar = compat.ProgressBar(self._show_progress_bar, *self._budget)
            if self._folder is not None:
                self._ownership = TrialOwnership(
                    self.study, self._folder, *self._budget, lock=self._lock
                )
            self.proposals = Proposals(self.study, *self._budget, ownership=self._ownership)
            self.ledger = Ledger(
                self.study,
                self.proposals,
                catch=self._catch,
                callbacks=self._callbacks,
                gc_after_trial=self.gc_after_trial,
                progress_bar=self._progress_bar,
            )
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress_bar.close()
        for number in self.proposals.unfinished():  # which the call never came to
            self.proposals.release(number)
        try:
            if self._ownership is not None:
                self._ownership.end()
        except Exception as error:
            compat.fleet_logger.warning(
                "That the call has ended could not be recorded; the same call will go on with "
                f"it: {error}"
            )
        finally:
            self._leave()

    def _leave(self) -> None:
        stop_retrying(self.study)
        compat.leave_loop(self.study)
