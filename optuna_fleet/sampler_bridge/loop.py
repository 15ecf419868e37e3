"""One `optimize` call as the study sees it: budget, loop flag, progress bar, records."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.samplers import RandomSampler
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from optuna_fleet.checkpoints.folder import StudyFolder
from optuna_fleet.sampler_bridge import compat
from optuna_fleet.sampler_bridge.ledger import Callback, Ledger
from optuna_fleet.sampler_bridge.objective_code import ObjectiveDigest
from optuna_fleet.sampler_bridge.ownership import TrialOwnership
from optuna_fleet.sampler_bridge.patience import Patience
from optuna_fleet.sampler_bridge.proposals import Proposals


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
        self._sampler: _RandomByNumber | None = None
        if type(self.study.sampler) is RandomSampler:
            self._sampler = _RandomByNumber(self.study.sampler, self.study)
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


class _RandomByNumber(RandomSampler):
    """Stands for a `RandomSampler` during one call of `optimize`.

    Optuna's draws from one generator, call after call, and with several trials under way their
    order is a matter of chance. Here each parameter of each trial is drawn by itself, from a seed
    that is the first number which the user's own sampler draws: so the same seed gives the same
    trials on any devices, and where an interrupted call is made again.

    Attributes:
        given: The user's own sampler.
    """

    def __init__(self, given: RandomSampler, study: optuna.Study) -> None:
        super().__init__()
        self.given = given
        nobody = create_trial(state=TrialState.RUNNING)
        self._seed = given.sample_independent(study, nobody, "", FloatDistribution(0.0, 1.0))

    def reseed_rng(self) -> None:
        """Do nothing: what was drawn before is not drawn again anyway."""

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """See `BaseSampler`."""
        place = f"{self._seed!r} {trial.number} {param_name}".encode()
        seed = int.from_bytes(hashlib.sha256(place).digest()[:4], "little")
        alone = RandomSampler(seed)
        return alone.sample_independent(study, trial, param_name, param_distribution)
