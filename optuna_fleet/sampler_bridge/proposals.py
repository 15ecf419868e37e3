"""Asking the study for trials, within the budget of one `optimize` call, and giving them back."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import optuna

from optuna_fleet.events import Event, ProposalDelayed, ProposalsExhausted, TrialProposed
from optuna_fleet.sampler_bridge import compat
from optuna_fleet.sampler_bridge.ownership import TrialOwnership
from optuna_fleet.sampler_bridge.patience import Patience

_NO_LIMIT = 2**31


class Proposals:
    """The trials that this call asked for and has not finished. No other trial is ever touched.

    `ownership` marks them as this call's, and gives those that a dead driver of it left.

    Attributes:
        num_asked: Trials asked for so far, but for those that were given back.
        is_delayed: There was none when it was asked last.
    """

    def __init__(
        self,
        study: optuna.Study,
        n_trials: int | None,
        timeout: float | None,
        patiently: Patience,
        ownership: TrialOwnership | None = None,
    ) -> None:
        self._study = study
        self._patiently = patiently
        self.n_trials = n_trials
        self.timeout = timeout
        self._began: float | None = None
        self._stopped = False
        self._ownership = ownership
        self.num_asked = 0
        self._trials: dict[int, optuna.Trial] = {}
        self._heartbeats = _Heartbeats(compat.storage_of(study))
        self.is_delayed = self._has_news = False
        self._adopted: deque[int] = deque()
        self._checkpoints: dict[int, str] = {}
        if ownership is not None:
            try:
                self._adopt(ownership)
            except BaseException:
                self.close()
                raise

    def _adopt(self, ownership: TrialOwnership) -> None:
        self.num_asked = ownership.num_launched
        self._checkpoints = dict(ownership.checkpoints)
        for trial in ownership.interrupted_trials:
            self._enter(trial)
            self._adopted.append(trial.number)
        while self._adopted and self.n_trials is not None and self.num_asked > self.n_trials:
            self.return_to_queue(self._adopted.pop())

    @property
    def are_claimed(self) -> bool:
        """Whether the same call can go on with these trials if this one does not end them."""
        return self._ownership is not None

    def adopted(self) -> list[int]:
        """Numbers of the trials that a dead driver left and that have not been asked for yet."""
        return list(self._adopted)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first trial could start; what `timeout` is compared with."""
        return time.monotonic() - self._began if self._began is not None else 0.0

    def stop(self) -> None:
        """Ask for no further trial."""
        self._stopped = True

    def next_events(self, *, again: bool = False) -> list[Event]:
        """Answer `Propose`; or, `again`, one that was delayed.

        To find out whether a trial is possible now takes a look at all that there are. So that is
        done where there is news, and not for each of the calls that trials make meanwhile.
        """
        if again and not (self.is_delayed and (self._has_news or self._is_spent())):
            return []
        self._has_news = False
        self.is_delayed = self._must_wait()
        if self.is_delayed:
            return [] if again else [ProposalDelayed()]
        number = self.ask()
        if number is None:
            return [ProposalsExhausted()]
        checkpoint = self._checkpoints.pop(number, None)
        to_come = self._num_to_come()
        return [TrialProposed(number=number, num_to_come=to_come, checkpoint=checkpoint)]

    def _num_to_come(self) -> int:
        """Trials that may still be asked for; until `timeout`, if they come as fast as so far."""
        if self._is_spent():
            return len(self._adopted)
        most: float = _NO_LIMIT if self.n_trials is None else self.n_trials - self.num_asked
        if self.timeout is not None:
            most = min(most, self.num_asked * (self.timeout / max(self.elapsed_s, 1e-3) - 1))
        return len(self._adopted) + math.ceil(most)

    def _must_wait(self) -> bool:
        if not self._trials or self._adopted or self._is_spent():
            return False
        return self._patiently(lambda: compat.has_none_left(self._study))

    def note_news(self) -> None:
        """A trial was suggested a parameter, or has had to do with the study itself."""
        self._has_news = True

    def reconsider_stop(self) -> None:
        """A sampler has just called `Study.stop`: one by brute force may have been too early.

        It looks at what is known of the space, which trials under way may still widen; it is
        asked again when the last of them ends.
        """
        sampler = compat.base_sampler(self._study.sampler)
        if len(self._trials) > 1 and isinstance(sampler, optuna.samplers.BruteForceSampler):
            compat.take_back_stop(self._study)

    def _is_spent(self) -> bool:
        return (
            self._stopped
            or compat.is_stopped(self._study)
            or (self.n_trials is not None and self.num_asked >= self.n_trials)
            or (self.timeout is not None and self.elapsed_s >= self.timeout)
        )

    def ask(self) -> int | None:
        """Return the number of a new trial, or None if no further one may start."""
        if self._began is None:
            self._began = time.monotonic()
        if self._adopted:  # under way already, as those are that `stop` leaves alone
            return self._adopted.popleft()
        if self._is_spent():
            return None
        self._patiently(self._heartbeats.catch_up)
        self._patiently(lambda: compat.fail_stale_trials(self._study))
        mark = None if self._ownership is None else self._ownership.mark
        trial_id = self._patiently(lambda: compat.take_trial(self._study, mark))
        trial = self._patiently(lambda: compat.trial_of(self._study, trial_id))
        self.num_asked += 1
        self._enter(trial)
        return trial.number

    def _enter(self, trial: optuna.Trial) -> None:
        self._trials[trial.number] = trial
        # From the moment of asking: a trial without a heartbeat is never found stale if we die.
        self._patiently(lambda: self._heartbeats.begin(trial))

    def __getitem__(self, number: int) -> optuna.Trial:
        return self._trials[number]

    def unfinished(self) -> list[int]:
        """Numbers of the trials asked for and neither told nor given back."""
        return list(self._trials)

    def release(self, number: int) -> None:
        """The trial has been told."""
        self._heartbeats.end(self._trials.pop(number))
        self._has_news = True

    def return_to_queue(self, number: int) -> None:
        """Return a trial that was never launched to the study; it does not count."""
        trial = self._trials[number]
        self.release(number)
        self._patiently(lambda: compat.return_to_queue(self._study, trial))
        if self._ownership is not None:
            self._ownership.give_up(trial)
            self._checkpoints.pop(number, None)
        self.num_asked -= 1

    def close(self) -> None:
        """The call is over."""
        self._heartbeats.close()


class _Heartbeats:
    """Records one of each trial every so often, for storages that take them, on its own thread.

    One that can't be recorded, as the storage is gone, is made up for before anybody of this
    process looks for stale trials.
    """

    def __init__(self, storage: Any) -> None:
        self._storage = storage
        every_s = getattr(storage, "get_heartbeat_interval", lambda: None)()
        self._every_s: float | None = every_s
        self._ids: set[int] = set()
        self._last = 0.0
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, trial: Any) -> None:
        """Record those of this trial from now on, the first at once."""
        if self._every_s is None:
            return
        self._storage.record_heartbeat(compat.id_of(trial))
        self._ids.add(compat.id_of(trial))
        if self._thread is None:
            self._thread = threading.Thread(target=self._beat, daemon=True)
            self._thread.start()

    def end(self, trial: Any) -> None:
        """The trial has ended."""
        self._ids.discard(compat.id_of(trial))

    def catch_up(self) -> None:
        """Record those that are overdue."""
        if self._ids and time.monotonic() - self._last > (self._every_s or 0.0):
            self._record()

    def _record(self) -> None:
        began = time.monotonic()
        for trial_id in list(self._ids):
            self._storage.record_heartbeat(trial_id)
        self._last = began

    def _beat(self) -> None:
        while not self._is_over.wait(self._every_s):
            with contextlib.suppress(Exception):  # the next one may work
                self._record()
        with contextlib.suppress(Exception):
            self._storage.remove_session()

    def close(self) -> None:
        """End the thread."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()


class BackgroundSampler:
    """Samples for one trial at a time; to Optuna it is one of the threads of ``n_jobs=2``."""

    def __init__(self, study: optuna.Study) -> None:
        self._study = study
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="optuna-fleet-sampler")

    def sample(self, trial: optuna.Trial) -> Future[None]:
        """Let the study's sampler propose the parameters of `trial`."""
        return self._pool.submit(compat.sample, self._study, trial)

    def close(self) -> None:
        """End the thread, once the sampler has answered."""
        self._pool.submit(compat.storage_of(self._study).remove_session)
        self._pool.shutdown()
