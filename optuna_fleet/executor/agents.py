"""The agent's process: which one it is, whether it is late, and when another is started."""

from __future__ import annotations

import os
import signal

from optuna_fleet.exceptions import LaunchError
from optuna_fleet.executor.cluster.config import AgentConfig
from optuna_fleet.executor.cluster.protocol import StartAgent
from optuna_fleet.executor.startup import Startup
from optuna_fleet.processes import cause_of_death

_MAX_FAILED = 3


class AgentKeeper:
    """Starts the agent, and another one where it was killed.

    Attributes:
        process: The agent.
        startup: Which of its processes are awaited, the agent itself among them.
        has_worked: A trainer of this agent was ready.
    """

    def __init__(self, config: AgentConfig, start: StartAgent, limit_s: float | None) -> None:
        self._config = config
        self._start = start
        self._limit_s = limit_s
        self._num_failed = 0
        self.start()

    def start(self) -> None:
        """Start one."""
        self.process = self._start(self._config)
        self.startup = Startup(self._limit_s)
        self.startup.started(self.process.pid, "The fleet's agent process")
        self.has_worked = False
        self._unheard = {device.index for device in self._config.devices}
        self._why_killed = ""

    def has_started(self, device: int) -> None:
        """It has tried to start the trainer of a device, the last thing to do until it is up."""
        self._unheard.discard(device)
        if not self._unheard:
            self.startup.over(self.process.pid)

    def kill(self, why: str = "") -> None:
        """Kill it; its end is heard of."""
        self._why_killed = why
        os.kill(self.process.pid, signal.SIGKILL)

    def replace(self) -> str:
        """Start another one, since this has ended; return with what.

        Raises:
            LaunchError: It ended before any trainer was ready: by itself, or killed several times
                in a row.
        """
        exit_code = self.process.exit_code or 0
        cause = cause_of_death(exit_code)
        self.process.close()
        self._num_failed = 0 if self.has_worked else self._num_failed + 1
        # One that was killed is tried again; one that ended by itself would do so again.
        if self._num_failed >= (_MAX_FAILED if exit_code < 0 else 1):
            raise LaunchError(
                f"The fleet's agent process ended with {cause} before any trainer was ready, "
                f"{self._num_failed} times in a row; "
                + (f"{self._why_killed}." if self._why_killed else "what it printed says why.")
            )
        self.start()
        return cause
