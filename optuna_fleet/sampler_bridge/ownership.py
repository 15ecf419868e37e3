"""Which trials belong to a call, as recorded with the study, so that it can be resumed.

A trial gets its mark together with its RUNNING state, so none can be without an owner. The same
call made again on the same checkpoint folder goes on with the marked trials, and with no others.
"""

from __future__ import annotations

import uuid
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from optuna_fleet.checkpoints.folder import CallRecord, StudyFolder
from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.sampler_bridge import compat
from optuna_fleet.sampler_bridge.objective_code import ObjectiveDigest
from optuna_fleet.sampler_bridge.patience import Patience

CLAIM_PREFIX = "optuna_fleet:claim:"


class TrialOwnership:
    """The trials of one call, which may have begun in a process that is dead.

    Attributes:
        interrupted_trials: Trials that a dead driver left RUNNING and that this call goes on with.
        checkpoints: Where those of them are that have one, by the trial's number.
        num_launched: How many trials the call has launched so far, these included.

    Raises:
        FleetConfigError: The folder can't be written to.
    """

    def __init__(
        self,
        study: optuna.Study,
        folder: StudyFolder,
        n_trials: int | None,
        timeout: float | None,
        digest: ObjectiveDigest | None = None,
        patiently: Patience | None = None,
    ) -> None:
        self._study = study
        self._patiently = patiently or Patience(study, 0.0)
        self._folder = folder
        self._call = CallRecord(
            study=study.study_name,
            id=uuid.uuid4().hex,
            n_trials=n_trials,
            timeout=timeout,
            **asdict(digest or ObjectiveDigest()),
        )
        self.interrupted_trials: list[optuna.Trial] = []
        self.checkpoints: dict[int, str] = {}
        self.num_launched = 0
        last = folder.last_call()
        try:
            if last is not None and not last.has_ended:
                self._resume(last)
            folder.record_call(self._call)
        except OSError as error:
            raise FleetConfigError(
                f"The checkpoint folder {folder.path} can't be written to ({error.strerror}): "
                "check that it may be and has space."
            ) from error
        complete = self._trials(TrialState.COMPLETE)
        folder.drop_all_but(
            unfinished={trial.number for trial in self.interrupted_trials},
            finals={trial.number for trial in complete},
        )

    def _resume(self, dead: CallRecord) -> None:
        """Go on for a driver that died: with its whole call, or only with its trials."""
        trials = [t for t in self._trials() if _is_claimed(t, dead.id)]
        running = [t for t in trials if t.state is TrialState.RUNNING]
        if dead.was_interrupted and _differ(dead.code, self._call.code):
            self._drop(running)
            return
        if (dead.n_trials, dead.timeout) == (self._call.n_trials, self._call.timeout):
            self._call = replace(self._call, id=dead.id)
            self.num_launched = sum(t.state is not TrialState.WAITING for t in trials)
        else:
            self.num_launched = len(running)
            for trial in running:
                self._record(trial, *self.mark(trial.number))
        for trial in trials:
            if trial.state is TrialState.WAITING:  # returned to the study
                self._record(trial, self._key, None)
        self.interrupted_trials = [self._gone_on_with(trial) for trial in running]
        if trials:
            self._study.sampler.reseed_rng()
            numbers, found = {trial.number for trial in running}, self._folder.unfinished()
            self.checkpoints = {n: path for n, path in found.items() if n in numbers}
            compat.fleet_logger.info(
                f"An earlier call was cut short: {len(trials) - len(running)} of its trials "
                f"are done, {len(running)} go on, {len(self.checkpoints)} of them from a "
                "checkpoint."
            )
        if running and _differ(dead.whole, self._call.whole):
            compat.fleet_logger.warning(
                "The objective, or a number or string that it uses, is another one than when "
                f"trials {_numbers(running)} began, which go on with it."
            )

    def _drop(self, running: list[FrozenTrial]) -> None:
        """Somebody has interrupted a call and changed the objective: its trials are no more."""
        for trial in running:
            end = partial(self._study.tell, trial.number, state=TrialState.FAIL)
            self._patiently(partial(end, skip_if_finished=True))
        if running:
            compat.fleet_logger.warning(
                "The objective's code was changed after an interrupt: trials "
                f"{_numbers(running)}, which were under way, are failed, and this is a call of "
                "its own."
            )

    def _trials(self, *states: TrialState) -> list[FrozenTrial]:
        return self._patiently(lambda: compat.trials_of(self._study, *states))

    def _record(self, trial: optuna.Trial | FrozenTrial, key: str, value: Any) -> None:
        self._patiently(lambda: compat.set_trial_record(self._study, trial, key, value))

    def _gone_on_with(self, trial: FrozenTrial) -> optuna.Trial:
        return self._patiently(lambda: compat.trial_of(self._study, compat.id_of(trial)))

    @property
    def _key(self) -> str:
        return CLAIM_PREFIX + self._call.id

    def mark(self, number: int | None) -> tuple[str, dict[str, Any]]:
        """The system attribute of a trial that is this call's."""
        # With its number if that is known: Optuna's retry of a failed trial copies all attributes.
        return self._key, {"number": number, "folder": str(self._folder.root)}

    def give_up(self, trial: optuna.Trial) -> None:
        """The trial was returned to the study: it belongs to no call."""
        self._record(trial, self._key, None)
        self._folder.drop(trial.number)

    def end(self, *, was_interrupted: bool = False) -> None:
        """The call is over; but it will be gone on with if it was interrupted.

        Or if one of its trials is still RUNNING.

        Raises:
            Exception: The study can't be read, or the record not be written.
        """
        if was_interrupted:
            self._folder.record_call(replace(self._call, was_interrupted=True))
            return
        trials = self._trials(TrialState.RUNNING)
        if not any(_is_claimed(trial, self._call.id) for trial in trials):
            self._folder.record_call(replace(self._call, has_ended=True))
            self._folder.drop_all_but(unfinished=set(), finals=self._folder.finals())


def _differ(old: str, new: str) -> bool:
    """Whether two digests are known to differ."""
    return bool(old and new) and old != new


def _numbers(trials: list[FrozenTrial]) -> str:
    return ", ".join(str(trial.number) for trial in trials)


def _is_claimed(trial: FrozenTrial, call_id: str) -> bool:
    mark = trial.system_attrs.get(CLAIM_PREFIX + call_id)
    if mark is None:
        return False
    is_retry = mark["number"] is None and "retry_history" in trial.system_attrs
    return not is_retry and mark["number"] in (None, trial.number)


def folders_of(trial: FrozenTrial) -> list[str]:
    """The checkpoint folders of the calls that ran a trial."""
    marks = [v for k, v in trial.system_attrs.items() if k.startswith(CLAIM_PREFIX)]
    return [mark["folder"] for mark in marks if mark is not None]
