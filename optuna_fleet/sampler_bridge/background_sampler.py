"""A slow sampler runs on a thread of its own, while the driver serves the running trials."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import optuna

from optuna_fleet.sampler_bridge import compat


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
