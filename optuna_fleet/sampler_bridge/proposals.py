"""Asking the study for trials, within the budget of one `optimize` call, and giving them back."""

from __future__ import annotations

import time

import optuna

from optuna_fleet.sampler_bridge import compat


class Proposals:
    """The trials that this call asked for and has not finished. No other trial is ever touched.

    Args:
        study: The user's study.
        n_trials: Trials to launch, or None for no limit.
        timeout: Seconds after which no further trial is launched, or None.
    """

    def __init__(self, study: optuna.Study, n_trials: int | None, timeout: float | None) -> None:
        self._study = study
        self._n_trials = n_trials
        self._timeout = timeout
        self._began: float | None = None
        self._stopped = False
        self._asked = 0
        self._trials: dict[int, optuna.Trial] = {}
        self._heartbeats: dict[int, compat.Heartbeat] = {}

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first trial could start; what `timeout` is compared with."""
        return time.monotonic() - self._began if self._began is not None else 0.0

    def stop(self) -> None:
        """Ask for no further trial."""
        self._stopped = True

    def ask(self) -> int | None:
        """Return the number of a new trial, or None if no further one may start."""
        if self._began is None:
            self._began = time.monotonic()
        if self._stopped or compat.is_stopped(self._study):
            return None
        if self._n_trials is not None and self._asked >= self._n_trials:
            return None
        if self._timeout is not None and self.elapsed_s >= self._timeout:
            return None
        compat.fail_stale_trials(self._study)
        trial = self._study.ask()
        self._asked += 1
        self._trials[trial.number] = trial
        # From the moment of asking: a trial without a heartbeat is never found stale if we die.
        self._heartbeats[trial.number] = heartbeat = compat.heartbeat(self._study, trial)
        heartbeat.start()
        return trial.number

    def __getitem__(self, number: int) -> optuna.Trial:
        return self._trials[number]

    def unfinished(self) -> list[int]:
        """Numbers of the trials asked for and neither told nor given back."""
        return list(self._trials)

    def release(self, number: int) -> None:
        """The trial has been told."""
        self._heartbeats.pop(number).join()
        del self._trials[number]

    def give_back(self, number: int) -> None:
        """Return a trial that was never launched to the study; it does not count."""
        trial = self._trials[number]
        self.release(number)
        compat.give_back(self._study, trial)
        self._asked -= 1
