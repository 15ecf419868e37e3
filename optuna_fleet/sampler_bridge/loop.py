"""One `optimize` call as the study sees it: budget, loop flag, progress bar, records."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import optuna
from optuna.samplers import RandomSampler
from optuna.study import StudyDirection

from optuna_fleet.checkpoints.folder import StudyFolder
from optuna_fleet.sampler_bridge import compat
from optuna_fleet.sampler_bridge.ledger import Callback, Ledger
from optuna_fleet.sampler_bridge.objective_code import ObjectiveDigest
from optuna_fleet.sampler_bridge.ownership import TrialOwnership
from optuna_fleet.sampler_bridge.patience import Patience
from optuna_fleet.sampler_bridge.proposals import Proposals
from optuna_fleet.sampler_bridge.random_by_number import RandomByNumber


@dataclass(kw_only=True, eq=False)
class Loop:
    """Context of one call; `proposals` and `ledger` are usable in it. Arguments as in Optuna."""

    study: optuna.Study = field(kw_only=False)
    n_trials: int | None
    timeout: float | None = None
    catch: tuple[type[Exception], ...] = ()
    callbacks: Iterable[Callback] | None = None
    gc_after_trial: bool = False
    show_progress_bar: bool = False
    storage_patience_s: float = 300.0
    folder: StudyFolder | None = None
    digest: ObjectiveDigest | None = None

    @property
    def maximize(self) -> bool | None:
        """Whether larger values are better; None where there are several objectives."""
        directions = self.study.directions
        return directions[0] is StudyDirection.MAXIMIZE if len(directions) == 1 else None

    def __enter__(self) -> Loop:
        compat.enter_loop(self.study)
        self._sampler: RandomByNumber | None = None
        if type(self.study.sampler) is RandomSampler:
            self._sampler = RandomByNumber(self.study.sampler, self.study)
            self.study.sampler = self._sampler
        budget = self.n_trials, self.timeout
        self.patiently = Patience(self.study, self.storage_patience_s)
        try:
            self._progress_bar = compat.ProgressBar(self.show_progress_bar, *budget)
            self._ownership = None
            if self.folder is not None:
                self._ownership = TrialOwnership(
                    self.study, self.folder, *budget, self.digest, self.patiently
                )
            self.proposals = Proposals(self.study, *budget, self.patiently, self._ownership)
            self.ledger = Ledger(
                self.study,
                self.proposals,
                self.patiently,
                catch=self.catch,
                callbacks=self.callbacks,
                gc_after_trial=self.gc_after_trial,
                progress_bar=self._progress_bar,
            )
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._progress_bar.close()
        self.proposals.close()
        for number in self.proposals.unfinished():  # those that were never launched
            self.proposals.release(number)
        try:
            if self._ownership is not None:
                self._ownership.end(
                    was_interrupted=kind is not None and not issubclass(kind, Exception)
                )
        except Exception as error:
            compat.fleet_logger.warning(
                "That the call has ended could not be recorded; the same call will go on with "
                f"it: {error}"
            )
        finally:
            self._leave()

    def _leave(self) -> None:
        if self._sampler is not None and self.study.sampler is self._sampler:
            self.study.sampler = self._sampler.given
        compat.leave_loop(self.study)
