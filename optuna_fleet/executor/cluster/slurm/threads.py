"""Threads that are waited for in the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Threads:
    """Those of one allocation; they may begin others."""

    def __init__(self) -> None:
        self._begun: list[threading.Thread] = []

    def begin(self, work: Callable[..., None], *arguments: object) -> None:
        """Do some work on a thread of its own."""
        name = "optuna-fleet-slurm"
        thread = threading.Thread(target=work, args=arguments, name=name, daemon=True)
        thread.start()
        self._begun.append(thread)

    def wait(self, deadline: float) -> None:
        """Wait until all have ended, or until then, by `time.monotonic`."""
        for thread in self._begun:  # which the last of them may have made longer
            thread.join(max(0.0, deadline - time.monotonic()))
