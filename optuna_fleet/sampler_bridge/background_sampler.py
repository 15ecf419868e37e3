"""A slow sampler thinks on a thread of its own, while the driver serves the trials that fly."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor

import optuna

from optuna_fleet.sampler_bridge import compat


class BackgroundSampler:
    """Samples for one trial at a time; to Optuna it is one of the threads of ``n_jobs=2``.

    Attributes:
        is_busy: It thinks, or its result has not been taken.
    """

    def __init__(self, study: optuna.Study) -> None:
        self._study = study
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="optuna-fleet-sampler")
        self._wake = os.eventfd(0)
        self._thought: Future[None] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether it thinks, or its result has not been taken."""
        return self._thought is not None

    @property
    def is_done(self) -> bool:
        """Whether `take` would return at once."""
        return self._thought is not None and self._thought.done()

    def fileno(self) -> int:
        """File descriptor that is readable when there is a result to take."""
        return self._wake

    def start(self, trial: optuna.Trial) -> None:
        """Let the study's sampler propose the parameters of `trial`."""
        self._thought = self._pool.submit(compat.sample, self._study, trial)
        self._thought.add_done_callback(lambda _: os.eventfd_write(self._wake, 1))

    def take(self) -> BaseException | None:
        """Wait until it is done; return what the sampler raised, if anything."""
        assert self._thought is not None
        os.eventfd_read(self._wake)
        thought, self._thought = self._thought, None
        return thought.exception()

    def close(self) -> None:
        """End the thread; it does not leave the sampler in the middle of a thought."""
        self._pool.submit(compat.storage_of(self._study).remove_session)
        self._pool.shutdown()
        os.close(self._wake)
