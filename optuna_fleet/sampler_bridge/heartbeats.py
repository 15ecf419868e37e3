"""Heartbeats of the trials under way, for storages that take them."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

from optuna_fleet.sampler_bridge import compat


class Heartbeats:
    """Records a heartbeat of each trial every so often, on a thread of its own.

    One that can't be recorded, as the storage is gone, is made up for before anybody of this
    process looks for stale trials.

    Args:
        storage: The study's storage.
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
        """Record heartbeats of this trial from now on.

        Raises:
            Exception: The first of them can't be recorded.
        """
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
        """Record those that are overdue.

        Raises:
            Exception: They can't be.
        """
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
