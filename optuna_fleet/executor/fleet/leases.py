"""Leases: driver and agents give signs of life, and each knows when the other counts as gone.

An agent ends its children before the driver places their trials again, so that no trial runs
twice.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping

from optuna_fleet.executor.cluster.agent.agent import SIGN_EVERY_S
from optuna_fleet.wire.channel import Channel
from optuna_fleet.wire.node_messages import SignOfLife

LEASE_S = 10.0
"""Seconds without a word from an agent after which its node is lost."""

DRIVER_LEASE_S = 6.0
"""Seconds without a word from the driver after which an agent ends, and all its children."""


def giving_signs(agents: Mapping[str, Channel]) -> Callable[[], None]:
    """Begin to give signs of life to agents, on a thread: samplers may compute for long.

    Args:
        agents: Their channels; may change at any time.

    Returns:
        Ends it.
    """
    stopped = threading.Event()

    def run() -> None:
        while not stopped.wait(SIGN_EVERY_S):
            for channel in list(agents.values()):
                with contextlib.suppress(OSError, ValueError):  # closed meanwhile
                    # What waits to be sent is a sign itself, once the agent takes it.
                    channel.flush() if channel.has_unsent else channel.post(SignOfLife())

    thread = threading.Thread(target=run, name="optuna-fleet-signs", daemon=True)
    thread.start()

    def stop() -> None:
        stopped.set()
        thread.join()

    return stop
