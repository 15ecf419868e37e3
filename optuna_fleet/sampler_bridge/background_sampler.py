"""A slow sampler runs on a thread of its own, while the driver serves the running trials."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor

import optuna

from optuna_fleet.sampler_bridge import compat
from optuna_fleet.sampler_bridge.patience import is_gone


class BackgroundSampler:
    """Samples for one trial at a time; to Optuna it is one of the threads of ``n_jobs=2``."""

    def __init__(self, study: optuna.Study) -> None:
        self._study = study
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="optuna-fleet-sampler")
        self._wake = os.eventfd(0)
        self._sampling: Future[None] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether it samples, or its result has not been taken."""
        return self._sampling is not None

    @property
    def is_done(self) -> bool:
        """Whether `take` would return at once."""
        return self._sampling is not None and self._sampling.done()

    def fileno(self) -> int:
        """File descriptor that is readable when there is a result to take."""
        return self._wake

    def start(self, trial: optuna.Trial) -> None:
        """Let the study's sampler propose the parameters of `trial`."""
        self._sampling = self._pool.submit(compat.sample, self._study, trial)
        self._sampling.add_done_callback(lambda _: os.eventfd_write(self._wake, 1))

    def take(self) -> BaseException | None:
        """Wait until it is done; return what the sampler raised, if anything.

        But for a storage that is gone: then the trial samples when it suggests, and waits for it.
        """
        assert self._sampling is not None
        os.eventfd_read(self._wake)
        sampling, self._sampling = self._sampling, None
        error = sampling.exception()
        return None if is_gone(error) else error

    def close(self) -> None:
        """End the thread, once the sampler has answered."""
        self._pool.submit(compat.storage_of(self._study).remove_session)
        self._pool.shutdown()
        os.close(self._wake)
